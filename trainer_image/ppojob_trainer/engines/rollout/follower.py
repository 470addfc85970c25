"""The workers of an engine on one of its other nodes (`engine_nodes`). vLLM's engine on the first node directs them.

Called by the process that reserves the GPUs of such a node, `roles.gpu_holder`. vLLM starts the workers as on the first
node; they meet the others over the network, and get their work over vLLM's message queues.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import socket
import threading
from collections.abc import Sequence
from multiprocessing.connection import wait
from pathlib import Path
from typing import Final

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProcHandle

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.errors import EngineLostError, RolloutError
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode, connect_to_first
from ppojob_trainer.engines.rollout.failure_log import end_of, explained, memory_shortage
from ppojob_trainer.engines.rollout.gpu_gate import GpuGate
from ppojob_trainer.engines.rollout.options import RolloutOptions
from ppojob_trainer.engines.rollout.vllm_arguments import checked_arguments, prepare_process

logger = logging.getLogger(__name__)

_EXIT_S: Final = 5.0


class EngineFollower:
    """See the module's docstring. Start the process with `options.environment`."""

    def __init__(self, options: RolloutOptions, node: EngineNode, log_file: Path) -> None:
        """`log_file`: this process's log, with the causes of vLLM's failures."""
        self._options, self._node, self._log_file = options, node, log_file
        self._gate = GpuGate()
        self._started: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._end: str | None = None

    def start(self) -> None:
        """Begin to start the workers, which load their libraries and then wait for `load`."""
        threading.Thread(target=self._run, name="engine's other node", daemon=True).start()

    def load(self, timeout_seconds: float) -> None:
        """Let the workers allocate their memory, and wait until all workers of the engine are ready.

        Raises:
            RolloutError: vLLM could not start them; with the cause from the log.
            TimeoutError: they were not ready in time.
        """
        self._gate.open()
        self._started.result(timeout_seconds)

    def check(self) -> None:
        """Find out whether the workers still run.

        Raises:
            EngineLostError: one of them exited, or the engine did.
        """
        if self._end is not None:
            raise EngineLostError(self._end)

    def _run(self) -> None:
        try:
            connection = connect_to_first(self._node, self._options.timeout_seconds)
        except OSError as error:
            first = f"{self._node.address}:{self._node.watch_port}"
            self._started.set_exception(RolloutError(f"the engine's first node ({first}) did not answer: {error}"))
        else:
            with connection:
                self._follow(connection)
        finally:
            self._gate.remove()

    def _follow(self, connection: socket.socket) -> None:
        """Start the workers, wait until the engine ends, and end them."""
        try:
            executor = self._executor(connection.getsockname()[0])
        except Exception as error:
            logger.exception("vLLM's workers could not start")
            failure = error
            if not isinstance(error, RolloutError):
                seen = RolloutError(f"vLLM could not start its workers with the model {self._options.path}: {error}")
                failure = explained(seen, self._log_file)
                failure.__cause__ = error
            self._report(connection, f"{failure}")
            self._started.set_exception(failure)
            return
        self._started.set_result(None)
        ended = wait([connection, *(worker.proc.sentinel for worker in executor.workers)])
        exited = [worker for worker in executor.workers if worker.proc.sentinel in ended]
        self._report(connection, self._exit_of(exited) if exited else "its first node has ended it")
        logger.info("the engine ends: %s", self._end)
        executor.shutdown()  # type: ignore[no-untyped-call]

    def _report(self, connection: socket.socket, why: str) -> None:
        self._end = why
        # OSError: the first node has ended.
        with contextlib.suppress(OSError):
            connection.sendall(why.encode())
            connection.shutdown(socket.SHUT_WR)

    def _executor(self, address: str) -> MultiprocExecutor:
        prepare_process(address)
        arguments = checked_arguments(self._options, self._node)
        if self._options.device is Device.CUDA:
            self._gate.hold(arguments)
        return MultiprocExecutor(arguments.create_engine_config(headless=True), monitor_workers=False)

    def _exit_of(self, workers: Sequence[WorkerProcHandle]) -> str:
        for worker in workers:
            # Its pipe ends a moment earlier.
            worker.proc.join(_EXIT_S)
        exits = [f"worker {worker.rank} exited with code {worker.proc.exitcode}" for worker in workers]
        shortage = memory_shortage(end_of(self._log_file))
        return f"vLLM's {' and '.join(exits)}: {shortage or f'see {self._log_file.name}'}"
