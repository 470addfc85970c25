"""Workers as a user would write them, for the tests of hooks. The trainer reads this file by its path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, Execute, register
from ppojob_trainer.worker_groups.mesh_worker import MeshWorker


class Recorder:
    """Writes down what the models saw and gave."""

    def __init__(self, context: Any, folder: str) -> None:
        self.context = context
        self.folder = Path(folder)

    @register(
        dispatch=Dispatch.RANK_ZERO,
        reads=(
            Keys.RAW_PROMPT,
            Keys.INPUT_IDS,
            Keys.RESPONSE_MASK,
            Keys.MODEL_SCORES,
            Keys.FUNCTION_SCORES,
            Keys.TOKEN_LEVEL_SCORES,
        ),
    )
    def write(self, batch: DataProto) -> dict[str, float]:
        rows = [
            {
                "prompt": list(prompt),
                "response": response,
                "model": model,
                "function": function,
                "total": total,
            }
            for prompt, response, model, function, total in zip(
                batch.array(Keys.RAW_PROMPT),
                batch.responses().to_lists(),
                batch.ragged(Keys.MODEL_SCORES).sums().tolist(),
                batch.ragged(Keys.FUNCTION_SCORES).sums().tolist(),
                batch.ragged(Keys.TOKEN_LEVEL_SCORES).sums().tolist(),
                strict=True,
            )
        ]
        step = batch.meta_info[Meta.GLOBAL_STEP]
        (self.folder / f"step-{step}.json").write_text(json.dumps(rows))
        return {"recorder/rows": float(len(rows))}


class Marker:
    """One method for each way of calling."""

    def __init__(self, context: Any, fail: bool = False) -> None:
        self.context = context
        self.fail = fail

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def mark(self, batch: DataProto) -> DataProto:
        if self.fail and self.context.rank == 1:
            raise ZeroDivisionError("of the user's own")
        ranks = torch.full((len(batch),), self.context.rank)
        doubled = 2 * batch.tensor("numbers")
        return DataProto.from_dict({"numbers": doubled, "rank": ranks}, meta_info={Meta.METRICS: {"a": [len(batch)]}})

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def drop(self, batch: DataProto) -> DataProto:
        return batch[: len(batch) - 1]

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> dict[str, float]:
        return {"rows/max": float(len(batch)), "sum/min": float(batch.tensor("numbers").sum())}

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def everybody(self, batch: DataProto) -> dict[str, float]:
        return {"rows": float(len(batch)), "step": float(batch.meta_info[Meta.GLOBAL_STEP])}

    @register(dispatch=Dispatch.ONE_TO_ALL, execute=Execute.RANK_ZERO)
    def first(self, batch: DataProto) -> dict[str, float]:
        return {"rank": float(self.context.rank), "sum": float(batch.tensor("numbers").sum())}


class Divided(MeshWorker):
    """Stages add ten each, and the two ranks of a layer one each, so no rank knows the answer alone."""

    def __init__(self, context: Any, failing: int | None = None) -> None:
        super().__init__(context)
        self.failing = failing
        self.mesh: DeviceMesh | None = None

    def joined(self) -> None:
        if self.context.rank == self.failing:
            raise FileNotFoundError("no such model")
        self.mesh = init_device_mesh("cpu", self.sizes, mesh_dim_names=("stage", "shard", "layer"))

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO)
    def add(self, batch: DataProto) -> DataProto:
        assert self.mesh is not None
        part = torch.ones(len(batch))
        dist.all_reduce(part, group=self.mesh.get_group("layer"))
        whole = part + 10
        dist.all_reduce(whole, group=self.mesh.get_group("stage"))
        ranks = torch.full((len(batch),), self.context.rank)
        return DataProto.from_dict({"numbers": batch.tensor("numbers") + whole, "rank": ranks})

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC)
    def count(self, batch: DataProto) -> dict[str, float]:
        return {"rows": float(len(batch)), "rank/max": float(self.context.rank)}
