"""`make test`: every part of the tests, two at a time."""
