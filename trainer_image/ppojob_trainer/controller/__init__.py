"""The algorithm: which calls, in which order, at the same time.

It knows Protocols only: no ray, no vllm, no tensors.
"""
