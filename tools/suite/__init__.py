"""`make test`: every part of the tests, in two lanes beside each other."""
