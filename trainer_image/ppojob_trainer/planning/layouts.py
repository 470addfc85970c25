"""Plans a job with other sizes of its pools: those that `recommendation` would try. Called by `cli`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.controller.pool_sizes import fewer, more, moved
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.plan import Plan, Runner, plan_job

__all__ = ["plan_other_sizes"]


def plan_other_sizes(spec: PPOJobSpec, gpus: Mapping[str, Gpu], *, runner: Runner) -> Iterator[Plan]:
    """Yield the plan of each other valid size of the pools, from half to double, the fewest GPUs first.

    Args:
        gpus: of each pool.
        runner: see `plan_job`; `measured_once` saves most of the time.
    """
    spec = resolve(spec)
    candidates = [pools for find in (fewer, more, moved) for pools in find(spec)]
    for pools in sorted(candidates, key=lambda found: sum(pool.gpus for pool in found)):
        try:
            yield plan_job(spec.model_copy(update={"pools": pools}), gpus, runner=runner)
        except ModelMismatchError:
            # Its sizes do not divide the model.
            continue
