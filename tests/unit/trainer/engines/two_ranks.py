"""One of two ranks: runs the engines on its shard and writes what it saw. Arguments: RANK PORT MODEL OUT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA, Offload, TrainedModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.network import connect
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import model as model_module
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.mesh import ParallelMesh, init_process_group
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.fsdp_engines import critic_engine, policy_engine, reference_engine
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH, make_batch

WORLD_SIZE = 2
LIMIT_S = 200.0
NUM_LAYERS, VALUE_HEAD = 3, 1
MESSAGE_BYTES = 100_000
"""More than a layer of the tiny model in float32, less than two of them, and more than three in bfloat16."""


def make_policy(
    parallel: ParallelMesh,
    model: Path,
    *,
    stays_gathered: bool = False,
    max_tokens: int = 40,
    dtype: torch.dtype = torch.float32,
    **settings: Any,
) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=max_tokens)
    actor = ActorModel(path=str(model), **settings)
    run: dict[str, Any] = {"total_steps": 9, "stays_gathered": stays_gathered, "dtype": dtype}
    return policy_engine(parallel, actor, training, AlgorithmSpec(), **run)


def make_critic(
    parallel: ParallelMesh, model: Path, *, stays_gathered: bool = False, max_tokens: int = 40, **settings: Any
) -> FSDPEngine:
    training = CriticSpec(learning_rate=1e-3, max_tokens_per_gpu=max_tokens)
    run: dict[str, Any] = {"total_steps": 9, "seed": 1, "stays_gathered": stays_gathered, "dtype": torch.float32}
    return critic_engine(parallel, TrainedModel(**settings), str(model), training, **run)


def whole_batch() -> DataProto:
    return make_batch(8, num_mini_batches=2)


def shard(rank: int) -> DataProto:
    """Give each rank its half of each of the two minibatches of four."""
    return whole_batch()[[4 * part + 2 * rank + row for part in (0, 1) for row in (0, 1)]]


def run(parallel: ParallelMesh, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Everything that is compared between one rank and two."""
    policy, critic = make_policy(parallel, model), make_critic(parallel, model)
    log_probs = policy.forward(batch).padded("old_log_probs", RESPONSE_LENGTH)
    values = critic.forward(batch).padded("values", RESPONSE_LENGTH)
    metrics = {**policy.update(batch), **critic.update(batch)}
    policy.save(folder / "checkpoint")
    policy.export(folder / "export")
    weights = [tensor.float().clone() for tensor in policy.weights().gather()]
    second = policy.update(batch)
    adapted = make_policy(
        parallel, model, lora=LoRA(rank=4), offload=Offload(parameters=True, optimizer=True), activation_offload=True
    )
    of_adapters = {**adapted.update(batch), "second": adapted.update(batch)["actor/pg_loss"]}
    adapted.export(folder / "adapted")
    return {
        "of_adapters": of_adapters,
        "log_probs": log_probs,
        "values": values,
        "metrics": metrics,
        "weights": weights,
        "second": second,
    }


class Messages(TorchDispatchMode):
    """Counts how often parameters are gathered and gradients are scattered meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.gathers = self.scatters = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gathers += func is torch.ops.c10d._allgather_base_.default
        self.scatters += func is torch.ops.c10d._reduce_scatter_base_.default
        return func(*args, **(kwargs or {}))


def run_gathering(parallel: ParallelMesh, model: Path, batch: DataProto, *, stays_gathered: bool) -> dict[str, Any]:
    """What must not change where models stay gathered, and how many messages each call took."""
    # No two sequences fit into a micro-batch.
    options: dict[str, Any] = {"stays_gathered": stays_gathered, "max_tokens": 16}
    away = Offload(parameters=True, optimizer=True)
    policy, critic = make_policy(parallel, model, **options), make_critic(parallel, model, **options)
    adapted = make_policy(parallel, model, lora=LoRA(rank=4), offload=away, **options)
    halved = make_policy(parallel, model, offload=away, dtype=torch.bfloat16, **options)
    kept = make_policy(parallel, model, gradient_checkpointing=False, **options)
    reference = reference_engine(
        parallel, str(model), stays_gathered=stays_gathered, max_tokens_per_gpu=16, dtype=torch.float32
    )
    policy.warm_up(8, 8)
    engines = {"policy": policy, "adapted": adapted, "halved": halved}

    def sent() -> dict[str, list[torch.Tensor]]:
        return {name: [tensor.clone() for tensor in engine.weights().gather()] for name, engine in engines.items()}

    before = sent()
    numbers: dict[str, Any] = {}
    messages: dict[str, tuple[int, int]] = {}
    for step in range(2):
        for name, call in (
            ("log_probs", policy.forward),
            ("ref", reference.forward),
            ("values", critic.forward),
            ("update_actor", policy.update),
            ("update_critic", critic.update),
            ("update_adapted", adapted.update),
            ("update_halved", halved.update),
            ("update_kept", kept.update),
        ):
            with Messages() as seen:
                found = call(batch)
            numbers[f"{name} {step}"] = (
                found if isinstance(found, dict) else {key: found.ragged(key).values for key in found.columns}
            )
            messages[name] = (seen.gathers, seen.scatters)
    with Messages() as seen:
        list(policy.weights().gather())
    messages["weights"] = (seen.gathers, seen.scatters)
    return {"numbers": numbers, "before": before, "sent": sent(), "messages": messages}


def main() -> None:
    rank, port, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    parallel = init_process_group(
        Device.CPU, rank, ParallelDims(shard=WORLD_SIZE), connect("127.0.0.1", port, 200), 200
    )
    found = run(parallel, model, shard(rank), out)
    vars(model_module)["MESSAGE_BYTES"] = MESSAGE_BYTES
    for name, stays_gathered in (("freed", False), ("gathered", True)):
        found[name] = run_gathering(parallel, model, shard(rank), stays_gathered=stays_gathered)
    torch.save(found, out / f"rank-{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main()
