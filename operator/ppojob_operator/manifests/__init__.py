"""How the objects of a job look: pure functions from the resolved spec to manifests.

`reconcile` calls them. They refuse to read anything: no cluster, no clock, no environment.
"""
