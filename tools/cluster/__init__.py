"""A real one-node Kubernetes for tests and the demo: `python -m tools.cluster --help` lists its commands.

Everything is built from Go modules and Debian packages; no image registry and no release download is needed.
It refuses to touch a cluster that it did not start.
"""
