"""The processes of a weight link that breaks: rank 0 sends, rank 1 receives, and rank 2 after rank 1 was lost.

`test_links_on_cuda` starts them. They wait for each other by files in a folder.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch

from ppojob_trainer.engines.allocator import use_expandable_segments
from ppojob_trainer.engines.errors import WeightLinkError
from ppojob_trainer.engines.weights.buckets import TensorSpec
from ppojob_trainer.engines.weights.plans import Backend, LinkPlan, WeightLink
from ppojob_trainer.engines.weights.receipts import Receipt, verify
from ppojob_trainer.engines.weights.receiver import WeightReceiver
from ppojob_trainer.engines.weights.sender import WeightSender

LIMIT_SECONDS = 100.0
NUM_TENSORS, SIZE = 4, 1 << 26
"""256 MiB each: NCCL's own buffers, which take a message that nobody receives, are smaller."""
GPU = torch.device("cuda", 0)


class Source:
    """Tensors of one number; the third comes when the file `third` is there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.value, self.waits = folder, 1.0, False

    def specs(self) -> list[TensorSpec]:
        return [TensorSpec(f"layer.{number}", (SIZE,), "float32") for number in range(NUM_TENSORS)]

    def gather(self) -> Iterator[torch.Tensor]:
        for number in range(NUM_TENSORS):
            if self.waits and number == 2:
                wait_for(self.folder / "third")
            yield torch.full((SIZE,), self.value, device=GPU)


def wait_for(file: Path) -> str:
    end = time.monotonic() + LIMIT_SECONDS
    while not file.exists():
        assert time.monotonic() < end, f"{file} did not come"
        time.sleep(0.05)
    return file.read_text()


def write(file: Path, text: str = "") -> None:
    part = file.with_suffix(".part")
    part.write_text(text)
    part.rename(file)


def link_of(folder: Path, number: int) -> WeightLink:
    return WeightLink(**json.loads(wait_for(folder / f"link-{number}")))


def send(folder: Path, backend: Backend, case: str) -> None:
    source = Source(folder)

    def opened(number: int) -> WeightSender:
        sender = WeightSender(source, [LinkPlan(0, backend, (0,))], "127.0.0.1", LIMIT_SECONDS, GPU, 4 * SIZE)
        [link] = sender.listen()
        write(folder / f"link-{number}", json.dumps(link.to_wire()))
        sender.prepare()
        return sender

    sender = opened(1)
    compare(folder, 1, sender.push(1))
    failure, started = "", time.monotonic()
    if case == "lost":
        source.waits = True
        try:
            sender.push(2)
        except WeightLinkError as error:
            failure = f"{error}"
    elif case == "closed":
        [link_end] = sender._link_ends
        link_end.begin(2, is_partial=False)
        time.sleep(2)
    closing = time.monotonic()
    sender.close()
    source.waits, source.value = False, 3.0
    seconds = {"until the failure": closing - started, "closing": time.monotonic() - closing}
    write(folder / "sender", json.dumps({"failure": failure, "seconds": seconds}))
    sender = opened(2)
    compare(folder, 3, sender.push(3))


def compare(folder: Path, version: int, sent: list[Receipt]) -> None:
    receipt = json.loads(wait_for(folder / f"receipt-{version}"))
    verify(sent[0], [Receipt(**{**receipt, "checksums": tuple(receipt["checksums"])})])


def receive(folder: Path, case: str) -> None:
    receiver = WeightReceiver(link_of(folder, 1), 1, GPU)
    take(folder, receiver, 1)
    if case == "idle":
        # The sender closes its side meanwhile.
        link_of(folder, 2)
    else:
        write(folder / "receiver", failure_of(folder, receiver, case))
    receiver.close()
    take(folder, WeightReceiver(link_of(folder, 2), 1, GPU), 3)


def failure_of(folder: Path, receiver: WeightReceiver, case: str) -> str:
    """Receive version 2, up to the loss of this process or of the sender."""
    try:
        for number, _ in enumerate(receiver.begin(2)):
            if case == "lost" and number == 1:
                write(folder / "lost")
                os._exit(0)
    except RuntimeError as error:
        # As a receiver does before it tells of the failure: it would wait for a transfer that still waits on the GPU.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return f"{error}"
    raise AssertionError("the sender closed the link, and the push came")


def take(folder: Path, receiver: WeightReceiver, version: int) -> None:
    stream = receiver.begin(version)
    for _, tensor in stream:
        assert bool((tensor == version).all())
    receipt = stream.receipt()
    write(folder / f"receipt-{version}", json.dumps({**vars(receipt)}))


def main() -> None:
    rank, folder, backend, case = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3], sys.argv[4]
    torch.cuda.set_device(GPU)
    if rank == 0:
        # As in the actor.
        use_expandable_segments()
        assert backend in ("nccl", "cuda_ipc")
        send(folder, backend, case)  # type: ignore[arg-type]
    elif rank == 1:
        receive(folder, case)
    else:
        take(folder, WeightReceiver(link_of(folder, 2), 1, GPU), 3)


if __name__ == "__main__":
    main()
