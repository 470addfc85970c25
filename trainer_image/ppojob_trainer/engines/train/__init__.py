"""Training: packed micro-batches, and the engines that compute with them.

`batch`, `sequence` and `model_fit` serve every engine; `fsdp` is the engine with PyTorch's FSDP2.
"""
