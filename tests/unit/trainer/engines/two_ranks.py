"""One of two ranks: runs the engines on its shard and writes what it saw. Arguments: RANK PORT MODEL OUT."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from ppojob_api.v1alpha1.algorithm import KL
from ppojob_api.v1alpha1.model import ActorModel, LoRA, Offload, TrainedModel
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec
from ppojob_trainer.engines.fsdp.critic import CriticEngine
from ppojob_trainer.engines.fsdp.mesh import DataParallel, init_process_group
from ppojob_trainer.engines.fsdp.policy import PolicyEngine
from ppojob_trainer.protocol import DataProto
from tests.unit.trainer.engines.tiny_llama import make_batch

WORLD_SIZE = 2


def make_policy(parallel: DataParallel, model: Path, **settings: Any) -> PolicyEngine:
    training = ActorSpec(learning_rate=1e-3, max_tokens_per_gpu=40)
    actor = ActorModel(path=str(model), **settings)
    return PolicyEngine(parallel, actor, training, KL(), total_steps=9, dtype=torch.float32)


def make_critic(parallel: DataParallel, model: Path) -> CriticEngine:
    training = CriticSpec(learning_rate=1e-3, max_tokens_per_gpu=40)
    return CriticEngine(parallel, TrainedModel(), str(model), training, total_steps=9, seed=1, dtype=torch.float32)


def whole_batch() -> DataProto:
    return make_batch(8, num_mini_batches=2)


def shard(rank: int) -> DataProto:
    """Give each rank its half of each of the two minibatches of four."""
    return whole_batch()[[4 * part + 2 * rank + row for part in (0, 1) for row in (0, 1)]]


def run(parallel: DataParallel, model: Path, batch: DataProto, folder: Path) -> dict[str, Any]:
    """Everything that is compared between one rank and two."""
    policy, critic = make_policy(parallel, model), make_critic(parallel, model)
    log_probs = policy.compute_log_prob(batch).tensor("old_log_probs")
    values = critic.compute_values(batch).tensor("values")
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


def main() -> None:
    rank, port, model, out = int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), Path(sys.argv[4])
    torch.set_num_threads(1)
    parallel = init_process_group(Device.CPU, rank, WORLD_SIZE, "127.0.0.1", port, 60)
    torch.save(run(parallel, model, shard(rank), out), out / f"rank-{rank}.pt")
    parallel.destroy()


if __name__ == "__main__":
    main()
