"""An engine's nodes notice each other's end: real connections, real processes in place of vLLM's workers."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

import pytest

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import EngineLostError, HostLostError, RolloutError
from ppojob_trainer.engines.rollout import engine as engine_module
from ppojob_trainer.engines.rollout import engine_nodes
from ppojob_trainer.engines.rollout import follower as follower_module
from ppojob_trainer.engines.rollout.engine import RolloutEngine
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode, Followers
from ppojob_trainer.engines.rollout.follower import EngineFollower
from ppojob_trainer.engines.rollout.options import AGENT_STORE, HOST_ADDRESS, RolloutOptions
from ppojob_trainer.engines.rollout.vllm_arguments import checked_arguments
from tests.ports import server_port

HERE, LIMIT_S = "127.0.0.1", 120.0
OPTIONS = RolloutOptions("/m", Device.CPU, 64, tensor_parallel_size=2, timeout_seconds=LIMIT_S)


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restore what a start sets for vLLM's processes: with the store's variable, no other test could open a group."""
    for name in (HOST_ADDRESS, AGENT_STORE, "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@dataclass
class Engine:
    """The first node: the reports of lost nodes."""

    reports: list[EngineLostError] = field(default_factory=list)

    async def first_report(self) -> str:
        async with asyncio.timeout(LIMIT_S):
            while not self.reports:
                await asyncio.sleep(0.01)
        return f"{self.reports[0]}"


@dataclass
class Worker:
    """A process in place of one of vLLM's."""

    rank: int
    process: subprocess.Popen[bytes]
    pipe: int

    @property
    def proc(self) -> Worker:
        return self

    @property
    def exitcode(self) -> int | None:
        return self.process.poll()

    @property
    def sentinel(self) -> int:
        return self.pipe

    def join(self, timeout: float) -> None:
        self.process.wait(timeout)


class Executor:
    """In place of vLLM's: one worker, and a record of its end."""

    def __init__(self) -> None:
        command = [sys.executable, "-c", "import time; time.sleep(600)"]
        end, of_worker = os.pipe()
        self.workers = [Worker(1, subprocess.Popen(command, pass_fds=[of_worker]), end)]
        os.close(of_worker)
        self.has_ended = threading.Event()

    def shutdown(self) -> None:
        self.workers[0].process.kill()
        self.workers[0].process.wait()
        self.has_ended.set()


@pytest.fixture
def executor(monkeypatch: pytest.MonkeyPatch) -> Iterator[Executor]:
    found = Executor()
    monkeypatch.setattr(EngineFollower, "_executor", lambda *_: found)
    # Between the end of a process's pipe and its exit code, a busy machine may do something else.
    monkeypatch.setattr(follower_module, "_EXIT_S", LIMIT_S)
    yield found
    found.shutdown()
    os.close(found.workers[0].pipe)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
async def first(engine: Engine) -> AsyncIterator[Followers]:
    found = Followers(engine.reports.append)
    yield found
    found.close()


async def second_of(first: Followers) -> EngineFollower:
    node = EngineNode(1, 2, HERE, 1, await first.listen(HERE), first.token)
    follower = EngineFollower(OPTIONS, node, Path("rollout_gpu_holder-0.log"))
    follower.start()
    return follower


async def until(is_true: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not is_true():
            await asyncio.sleep(0.01)


def is_lost(follower: EngineFollower) -> bool:
    try:
        follower.check()
    except EngineLostError:
        return True
    return False


async def test_a_worker_that_exits_ends_the_engine_and_is_named(
    engine: Engine, first: Followers, executor: Executor
) -> None:
    follower = await second_of(first)
    await asyncio.to_thread(follower.load, LIMIT_S)
    assert engine.reports == []

    executor.workers[0].process.kill()

    assert await engine.first_report() == (
        "the engine has lost its workers on the node with address 127.0.0.1: vLLM's worker 1 exited with code -9: see "
        "rollout_gpu_holder-0.log"
    )
    assert executor.has_ended.wait(LIMIT_S)
    with pytest.raises(EngineLostError, match="worker 1 exited with code -9"):
        follower.check()


async def test_the_end_of_the_first_node_ends_the_workers_of_the_others(
    engine: Engine, first: Followers, executor: Executor
) -> None:
    follower = await second_of(first)
    await asyncio.to_thread(follower.load, LIMIT_S)
    await until(lambda: bool(first._writers))

    first.close()

    await asyncio.to_thread(executor.has_ended.wait, LIMIT_S)
    await until(lambda: is_lost(follower))
    assert engine.reports == [], "the engine ended it itself"


async def test_a_node_whose_process_is_gone_ends_the_engine(engine: Engine, first: Followers) -> None:
    port = await first.listen(HERE)
    connecting = f"one = socket.create_connection(('{HERE}', {port})); one.sendall(b'{first.token}')"
    other = subprocess.Popen([sys.executable, "-c", f"import socket, time; {connecting}; time.sleep(600)"])
    await until(lambda: bool(first._writers))

    other.kill()
    other.wait()

    assert "127.0.0.1: its process or its pod has ended" in await engine.first_report()


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\n\r\n", b"0" * 32, b"0" * 100])
async def test_a_connection_without_the_token_ends_nothing(engine: Engine, first: Followers, sent: bytes) -> None:
    port = await first.listen(HERE)
    reader, stranger = await asyncio.open_connection(HERE, port)
    stranger.write(sent)
    if len(sent) < len(first.token):
        stranger.write_eof()

    assert await reader.read() == b"", "it was closed"

    stranger.close()
    assert engine.reports == []
    assert first._writers == []


async def test_workers_that_cannot_start_are_reported_on_both_nodes(
    engine: Engine, first: Followers, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any) -> Executor:
        raise OSError("no such model")

    monkeypatch.setattr(EngineFollower, "_executor", fails)
    follower = await second_of(first)

    with pytest.raises(RolloutError, match="could not start its workers with the model /m: no such model"):
        await asyncio.to_thread(follower.load, LIMIT_S)
    assert "no such model" in await engine.first_report()


async def test_a_first_node_that_does_not_listen_is_named() -> None:
    port = server_port()
    follower = EngineFollower(OPTIONS, EngineNode(1, 2, HERE, 1, port, ""), Path("a.log"))
    follower.start()

    with pytest.raises(RolloutError, match=rf"the engine's first node \(127.0.0.1:{port}\) did not answer"):
        await asyncio.to_thread(follower.load, LIMIT_S)


def test_vllm_gets_the_place_of_the_node() -> None:
    arguments = checked_arguments(OPTIONS, EngineNode(1, 2, "10.0.0.7", 1234, 5678, ""))

    found = (arguments.nnodes, arguments.node_rank, arguments.master_addr, arguments.master_port)
    assert found == (2, 1, "10.0.0.7", 1234)
    assert (arguments.tensor_parallel_size, arguments.distributed_executor_backend) == (2, "mp")


@pytest.mark.parametrize(("tensor", "stages", "is_within_nodes"), [(2, 1, False), (2, 2, True), (1, 2, True)])
def test_vllms_kernel_for_one_host_reduces_over_the_gpus_of_a_node_alone(
    tensor: int, stages: int, is_within_nodes: bool
) -> None:
    options = replace(OPTIONS, tensor_parallel_size=tensor, pipeline_parallel_size=stages)

    arguments = checked_arguments(options, EngineNode(1, 2, "10.0.0.7", 1234, 5678, ""))

    assert arguments.disable_custom_all_reduce is not is_within_nodes


class WaitingLlm:
    """In place of vLLM's engine, whose workers wait for those of a node that is gone."""

    errored = False

    async def collective_rpc(self, *_: Any, **__: Any) -> list[Any]:
        await asyncio.Event().wait()
        raise AssertionError("it waits for ever")

    def shutdown(self) -> None:
        """It has no processes."""


@pytest.mark.parametrize("exits", [False, True])
async def test_a_push_ends_when_a_node_is_gone_though_vllm_waits(exits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """`exits`: vLLM's engine exits as well, a moment before the end of the connection is seen."""
    monkeypatch.setattr(engine_nodes, "LATER_S", LIMIT_S)
    engine, llm = RolloutEngine(OPTIONS), WaitingLlm()
    engine._llm = cast("Any", llm)
    node = await engine.meet(HERE, 2)
    _, other = await asyncio.open_connection(HERE, node.watch_port)
    other.write(node.token.encode())
    pushing = asyncio.create_task(engine.update_weights(1))
    await until(lambda: bool(engine._nodes._followers._writers))
    assert not pushing.done()

    llm.errored = exits
    # It has seen that.
    await asyncio.sleep(1.0 if exits else 0.0)
    assert not pushing.done()
    other.close()

    with pytest.raises(EngineLostError, match=r"lost its workers on the node with address 127\.0\.0\.1"):
        await pushing
    with pytest.raises(EngineLostError, match="its process or its pod has ended"):
        engine.check()
    await engine.shutdown()


class StartingLlm:
    """In place of vLLM's class: a start that ends with its child process."""

    child: subprocess.Popen[bytes] | None = None

    @classmethod
    def from_engine_args(cls, _: Any) -> None:
        cls.child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        cls.child.wait()
        raise RuntimeError("vLLM's engine exited")


async def test_a_start_ends_when_a_node_is_gone_though_vllm_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "AsyncLLM", StartingLlm)
    engine = RolloutEngine(OPTIONS)
    node = await engine.meet(HERE, 2)
    _, other = await asyncio.open_connection(HERE, node.watch_port)
    other.write(node.token.encode())
    starting = asyncio.create_task(engine.start())
    await until(lambda: StartingLlm.child is not None and bool(engine._nodes._followers._writers))
    assert not starting.done()

    other.close()

    with pytest.raises(EngineLostError, match="its process or its pod has ended"):
        await starting
    assert StartingLlm.child is not None
    assert StartingLlm.child.wait(LIMIT_S) == -9
    await engine.shutdown()


class Silent:
    """Both ends of a connection to a host that stops to answer."""

    def __init__(self, token: str, end: socket.socket) -> None:
        self.token, self.about = token.encode(), {"peername": ("10.0.0.9", 1), "socket": end}

    def get_extra_info(self, name: str) -> Any:
        return self.about[name]

    async def readexactly(self, _: int) -> bytes:
        return self.token

    async def read(self, _: int) -> bytes:
        raise TimeoutError(110, "Connection timed out")

    def close(self) -> None:
        """There is no connection."""


async def test_a_host_that_does_not_answer_is_no_process_that_ended(engine: Engine, first: Followers) -> None:
    await first.listen(HERE)
    with socket.socket() as end:
        silent: Any = Silent(first.token, end)
        await first._follow(silent, silent)

    assert "10.0.0.9: its host does not answer any more" in await engine.first_report()
    assert isinstance(engine.reports[0], HostLostError)
