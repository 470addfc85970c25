"""What a release is made of, and making it: `make release`."""
