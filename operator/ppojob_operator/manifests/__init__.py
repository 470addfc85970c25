"""The Kubernetes objects of a job: pure functions from the resolved spec to manifests.

`reconcile` calls them. They read no cluster, no clock and no environment.
"""
