"""The contract between the user, the operator and the trainer: what a PPOJob is.

Both images import this package, so it stands on pydantic and the standard library alone.
"""
