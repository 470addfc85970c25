"""Prints what the worker extension and the engine do. A separate process, because an import of vLLM changes much."""

import asyncio
import json
import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from logging.handlers import BufferingHandler
from types import SimpleNamespace
from typing import Any, NoReturn, cast

import torch
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.model_executor.layers.linear import UnquantizedLinearMethod

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.engine import RolloutEngine
from ppojob_trainer.engines.rollout.options import RolloutOptions
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension, keeps_weights_as_they_come
from ppojob_trainer.engines.weights.receipts import UNREAD, Receipt
from ppojob_trainer.engines.weights.receiver import WeightReceiver, WeightStream


class Quantized(UnquantizedLinearMethod):
    """Any other method than vLLM's own plain ones."""


def model_with(**attributes: object) -> nn.Module:
    """Return a model one of whose parts has the attributes."""
    part = nn.Module()
    for name, value in attributes.items():
        setattr(part, name, value)
    return nn.Sequential(nn.Module(), part)


MODELS = {
    "plain": model_with(quant_method=UnquantizedLinearMethod()),
    "quantized": model_with(quant_method=Quantized()),
    "worked on": model_with(process_weights_after_loading=lambda dtype: None),
}


class Model(nn.Module):
    """Takes one weight, and changes it at the copies whose numbers are given."""

    def __init__(self, changes_at: Iterable[int] = ()) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3))
        self.changes_at, self.num_copies = set(changes_at), 0

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        ((_, tensor),) = weights
        self.weight.data.copy_(tensor + (self.num_copies in self.changes_at))
        self.num_copies += 1


def outcomes(model: Model) -> dict[str, str]:
    """Copy weights, compared and not; return what was found."""
    worker = WeightReceiverExtension()
    worker.model_runner = SimpleNamespace(get_model=lambda: model)
    worker.vllm_config = cast(VllmConfig, SimpleNamespace(parallel_config=SimpleNamespace(world_size=1)))
    # The weights are on the CPU.
    worker.device = torch.device("cuda")
    found = {}
    pushes: list[tuple[str, bool, bool]] = [
        # Its name, and whether it is compared and partial.
        ("compared", True, False),
        ("partial", True, True),
        ("not compared", False, False),
        ("partial after it", True, True),
    ]
    for number, (name, is_compared, is_partial) in enumerate(pushes):
        stream = stream_of({"weight": torch.ones(3)}, is_compared=is_compared, is_partial=is_partial)
        try:
            done = worker._ppojob_load(number, stream)
            found[name] = "read back" if done == (True, None) else "loaded"
        except WeightSyncError:
            found[name] = "refused"
    return found


class Arrived(dict[str, Tensor]):
    """Weights that have come, as a `WeightStream`."""

    is_compared, is_partial = True, False

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items())


def stream_of(weights: dict[str, Tensor], **kind: bool) -> WeightStream:
    stream = Arrived(weights)
    vars(stream).update(kind)
    return cast(WeightStream, stream)


class Stream:
    """Yields a weight, and remembers whether the rest was taken."""

    is_compared, is_drained = False, False

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield "weight", torch.ones(3)

    def drain(self, error: BaseException) -> None:
        self.is_drained = error is not None

    def receipt(self) -> NoReturn:
        raise WeightSyncError("only 0 of 1 buckets were loaded")


def fails(*_: object, **__: object) -> NoReturn:
    raise ValueError("no such weight")


def reads_nothing(*_: object, **__: object) -> tuple[bool, None]:
    return False, None


def failure(load: Callable[..., Any]) -> dict[str, object]:
    """Receive weights that cannot be loaded; return the answer, and whether the rest of the push was taken."""
    stream, worker = Stream(), WeightReceiverExtension()
    worker.ppojob_receiver = cast(WeightReceiver, SimpleNamespace(begin=lambda version, keeps_weights: stream))
    worker.vllm_config, worker.device = VllmConfig(), torch.device("cpu")
    worker._ppojob_load = load  # type: ignore[method-assign]
    return {"answer": worker.ppojob_receive_weights(1, True), "is_drained": stream.is_drained}


def logged(unread: list[list[str]]) -> list[str]:
    """Update the weights of an engine whose workers did not read these names; return what the engine logs."""

    async def answers(*_: object, **__: object) -> list[dict[str, Any]]:
        return [{**asdict(Receipt(1, 3, 12, (1,))), UNREAD: names} for names in unread]

    async def nothing() -> None:
        return

    records = BufferingHandler(capacity=100)
    engine = RolloutEngine(RolloutOptions(path="/model", device=Device.CUDA, max_model_len=8))
    engine._workers, engine.reset_prefix_cache = answers, nothing  # type: ignore[method-assign, assignment]
    logger = logging.getLogger(RolloutEngine.__module__)
    logger.addHandler(records)
    receipts = asyncio.run(engine.update_weights(1))
    logger.removeHandler(records)
    assert receipts == [Receipt(1, 3, 12, (1,))] * len(unread)
    return [record.getMessage() for record in records.buffer]


if __name__ == "__main__":
    found = {
        "failure": failure(fails),
        "partial": failure(reads_nothing),
        "kept": {name: keeps_weights_as_they_come(model) for name, model in MODELS.items()},
        "changing": outcomes(Model(changes_at=range(2))),
        "right": outcomes(Model()),
        "logged": {
            "experts of others": logged([["expert 1"], ["expert 0"]]),
            "an expert of nobody": logged([["expert 1", "expert 2"], ["expert 0", "expert 2"]]),
            "one worker": logged([[]]),
        },
    }
    sys.stdout.write(json.dumps(found))
