"""An end of a weight link that waits for another end, which is gone: it fails long before the link's limit."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ppojob_trainer.engines.errors import RendezvousError, WeightLinkError
from ppojob_trainer.engines.network import connect, listen
from ppojob_trainer.engines.weights import channels
from ppojob_trainer.engines.weights import waiting as waiting_module
from ppojob_trainer.engines.weights.channels import _NcclChannel, _no_watchdog
from ppojob_trainer.engines.weights.plans import LinkPlan, WeightLink
from ppojob_trainer.engines.weights.sender import WeightSender
from ppojob_trainer.engines.weights.waiting import BrokenLinkError, break_off, mark_broken, value_of
from tests.unit.trainer.engines.test_engine_weights import HOST, Tensors, connected

CPU = torch.device("cpu")
LIMIT_S = 3600.0


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as executor:
        yield executor


class Work:
    def __init__(self, *, is_done: bool) -> None:
        self.is_done = is_done

    def is_completed(self) -> bool:
        return self.is_done

    def wait(self) -> None:
        assert self.is_done, "it would wait for ever"


class Group:
    """A group of NCCL whose first transfer is done, and whose others are not: the other side is gone."""

    def __init__(self) -> None:
        self.num_transfers = 0
        self.may_end = threading.Event()
        self.is_aborted = threading.Event()

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> Work:
        self.num_transfers += 1
        return Work(is_done=self.num_transfers == 1)

    def abort(self) -> None:
        assert self.may_end.wait(60)
        self.is_aborted.set()


def channel_of(group: Group) -> tuple[_NcclChannel, WeightLink]:
    store = listen(HOST, LIMIT_S)
    return _NcclChannel(group, store, CPU, dict), WeightLink("nccl", HOST, store.port, 1, LIMIT_S)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `break_off` connect to a link that is there, however busy the machine is."""
    monkeypatch.setattr(waiting_module, "_CONNECT_LIMIT_S", 240.0)


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("patient")
def test_a_sender_does_not_wait_for_a_receiver_that_never_connects(pool: ThreadPoolExecutor) -> None:
    sender = WeightSender(Tensors(), [LinkPlan(0, "gloo", (0,))], HOST, LIMIT_S, CPU)
    [link] = sender.listen()
    preparing = pool.submit(sender.prepare)

    break_off(link)

    with pytest.raises(RendezvousError, match="another end of the weight link was closed or lost"):
        preparing.result()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("patient")
def test_a_receiver_does_not_wait_for_a_push_that_never_begins(pool: ThreadPoolExecutor) -> None:
    sender, (receiver,) = connected(Tensors(), pool, num_receivers=1, limit=LIMIT_S)
    waiting = pool.submit(receiver.begin, 1)

    break_off(receiver._link)

    with pytest.raises(WeightLinkError, match=r"did not begin to send version 1: another end .* closed or lost"):
        waiting.result()
    sender.close()
    receiver.close()


@pytest.mark.timeout(300)
@pytest.mark.usefixtures("patient")
def test_a_transfer_over_nccl_ends_when_the_link_is_broken(pool: ThreadPoolExecutor) -> None:
    group = Group()
    group.may_end.set()
    channel, link = channel_of(group)
    sending = pool.submit(channel.send, torch.zeros(4, dtype=torch.uint8))

    break_off(link)

    with pytest.raises(BrokenLinkError, match="closed or lost"):
        sending.result()
    assert group.is_aborted.is_set(), "its kernel would keep the GPU from being synchronized"


@pytest.mark.timeout(300)
def test_a_transfer_over_nccl_ends_at_its_limit() -> None:
    group = Group()
    group.may_end.set()
    channel, _ = channel_of(group)
    channel._store.set_timeout(timedelta(seconds=0.2))

    with pytest.raises(BrokenLinkError, match=r"a part of the weights did not come within 0\.2 s"):
        channel.send(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.timeout(300)
def test_a_wait_ends_when_the_sender_is_gone(pool: ThreadPoolExecutor) -> None:
    store = listen(HOST, LIMIT_S)
    waiting = pool.submit(value_of, connect(HOST, store.port, LIMIT_S), "key")

    del store

    with pytest.raises(dist.DistError):
        waiting.result()


def test_a_link_whose_sender_is_gone_may_be_broken_off() -> None:
    store = listen(HOST, LIMIT_S)
    link = WeightLink("nccl", HOST, store.port, 1, LIMIT_S)
    other = connect(HOST, store.port, LIMIT_S)
    del store

    mark_broken(other)
    break_off(link)


@pytest.mark.timeout(300)
def test_closing_does_not_wait_for_the_other_side(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(channels, "_ABORT_LIMIT_S", 0.1)
    group = Group()
    channel, _ = channel_of(group)

    channel.close()

    assert not group.is_aborted.is_set()
    group.may_end.set()
    assert group.is_aborted.wait(60)
    with pytest.raises(BrokenLinkError, match="this end of the weight link is closed"):
        channel.send(torch.zeros(4, dtype=torch.uint8))


@pytest.mark.parametrize("before", [None, "0"])
def test_only_the_groups_of_weights_raise_the_errors_of_nccl(
    monkeypatch: pytest.MonkeyPatch, before: str | None
) -> None:
    name = "TORCH_NCCL_BLOCKING_WAIT"
    monkeypatch.setenv(name, "x")
    monkeypatch.delenv(name) if before is None else monkeypatch.setenv(name, before)

    with _no_watchdog():
        inside = os.environ[name]

    assert (inside, os.environ.get(name)) == ("1", before)
