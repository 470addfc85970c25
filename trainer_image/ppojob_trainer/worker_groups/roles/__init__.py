"""One file for each role: the worker, which runs in the role's processes, and the group, which the controller calls.

A worker's methods are `@register`ed and compute with an engine; a group picks rows for ranks, calls them, and
implements the role's Protocol of `controller.ports` without importing it.
"""
