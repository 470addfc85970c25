"""The algorithm: which calls a run makes, in which order, and which of them run at the same time.

It depends on Protocols only: no ray, no vllm, no tensors.
"""
