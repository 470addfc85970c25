"""Training with PyTorch's FSDP2: policy, reference and value model, their optimizers and checkpoints; reward model."""
