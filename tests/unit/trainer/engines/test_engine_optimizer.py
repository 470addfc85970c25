"""The course of the learning rate, and the norm of gradients that are divided over a mesh."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, _redistribute
from torch.distributed.tensor.placement_types import Placement

from ppojob_api.v1alpha1.training import ActorSpec, LearningRateSchedule
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.optimizer import Optimizer
from ppojob_trainer.engines.train.learning_rate import learning_rate_factor
from ppojob_trainer.planning.fake_device import fake_ranks


@pytest.mark.parametrize(
    ("kind", "warmup", "expected"),
    [
        (LearningRateSchedule.CONSTANT, 0, [1, 1, 1, 1, 1]),
        (LearningRateSchedule.CONSTANT, 4, [0.25, 0.5, 0.75, 1, 1]),
        (LearningRateSchedule.LINEAR, 0, [1, 0.75, 0.5, 0.25, 0]),
        (LearningRateSchedule.LINEAR, 2, [0.5, 1, 1, 0.5, 0]),
        (LearningRateSchedule.COSINE, 0, [1, 0.853553, 0.5, 0.146447, 0]),
    ],
)
def test_warm_up_then_schedule(kind: LearningRateSchedule, warmup: int, expected: list[float]) -> None:
    training = ActorSpec(learning_rate_schedule=kind, learning_rate_warmup_steps=warmup)
    factor = learning_rate_factor(training, total_steps=4)
    assert [factor(update) for update in range(5)] == pytest.approx(expected, abs=1e-6)


def test_after_the_last_step_it_stays_at_the_end() -> None:
    factor = learning_rate_factor(ActorSpec(learning_rate_schedule=LearningRateSchedule.COSINE), total_steps=4)
    assert factor(9) == 0


def test_adamw_has_the_decay_rates_of_the_spec() -> None:
    optimizer = Optimizer(nn.Linear(2, 1), ActorSpec(betas=[0.5, 0.75]), total_steps=4)

    assert [group["betas"] for group in optimizer.adamw.param_groups] == [(0.5, 0.75)]


def test_norms_over_a_mesh_are_summed_over_the_axes_that_divide_a_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sum over two equal ranks doubles a number. torch does not warn, as it does of several sums of one DTensor."""
    warnings: list[object] = []
    monkeypatch.setattr(
        _redistribute, "_warn_flatten_optimization_not_possible", lambda *given, **named: warnings.append(given)
    )
    monkeypatch.setattr(dist, "all_reduce", lambda tensor, group: tensor.mul_(group.size()))
    module = nn.ParameterDict()
    with fake_ranks(ParallelDims(shard=4)):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "expert"))
        other = init_device_mesh("cpu", (4,), mesh_dim_names=("all",))
        placed: dict[str, tuple[DeviceMesh, list[Placement]]] = {
            "over four": (mesh, [Shard(0), Shard(0)]),
            "over two": (mesh, [Replicate(), Shard(0)]),
            "on each": (mesh, [Replicate(), Replicate()]),
            "over others": (other, [Shard(0)]),
        }
        for name, (where, placements) in placed.items():
            module[name] = nn.Parameter(DTensor.from_local(torch.zeros(2), where, placements))
            module[name].grad = DTensor.from_local(torch.full((2,), 3.0), where, placements)
        module["plain"] = nn.Parameter(torch.zeros(2))
        module["plain"].grad = torch.full((2,), 3.0)
        norm = Optimizer(module, ActorSpec(grad_clip=0), total_steps=4).clip()

    assert not isinstance(norm, DTensor)
    assert float(norm) == pytest.approx((18 * (4 + 2 + 1 + 4 + 1)) ** 0.5)
    assert warnings == []
