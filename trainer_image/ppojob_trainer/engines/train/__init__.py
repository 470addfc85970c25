"""Training: the interface of the engines, what serves all of them, and the engine with PyTorch's FSDP2 (`fsdp`).

`engine` is the interface; `loader` creates the engine that a PPOJob names. `objectives`, `learning_rate`, `batch`,
`sequence`, `mesh` and `model_fit` serve every engine. Roles import no engine: `loader` does.
"""
