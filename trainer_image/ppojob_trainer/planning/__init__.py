"""Plans a job's memory, traffic and seconds without GPUs: the command `ppojob plan`.

The trained roles' own models are built, sharded and run once on fake tensors, which have shapes and no memory, in a
fake process group of the role's size. Sums over a pool are `main.memory_fit`'s, as before a real run.
"""

from ppojob_trainer.planning.configs import ShapeNotFoundError
from ppojob_trainer.planning.plan import Plan, plan_job

__all__ = ["Plan", "ShapeNotFoundError", "plan_job"]
