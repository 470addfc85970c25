"""One child process as its parent holds it: started, sent work, read, ended. Called by `processes`.

No call here waits for the child longer than `_SOCKET_LIMIT_S`: a child that hangs in the middle of a message counts as
one that ended.
"""

from __future__ import annotations

import os
import signal
import socket
import struct
import subprocess
import sys
import time
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any

from ppojob_trainer.rewards.scoring.messages import Answer, Setup, Work

_SOCKET_LIMIT_S = 10
_END_LIMIT_S = 5.0
_STACK_S = 0.2


class ChildProcess:
    """A running child.

    deadlines: when each response that it has must be scored (monotonic seconds), by number. is_ready: it has loaded the
    function. is_alone: the one response that it has must stay the only one. ending: how it ended, in words.
    """

    def __init__(self, setup: Setup) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # Both directions: neither a full pipe nor half a message may hold the parent.
            for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):
                ours.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", _SOCKET_LIMIT_S, 0))
            self._process = subprocess.Popen(
                # -P: a file of the working directory must not take the place of a module of Python.
                [sys.executable, "-P", "-m", "ppojob_trainer.rewards.scoring.child", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                # It leads a group, which ends with it: the function may have started processes, too.
                start_new_session=True,
            )
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.deadlines: dict[int, float] = {}
        self.started = time.monotonic()
        self.is_ready = False
        self.is_alone = False
        self.ending = ""
        self._send(setup)

    def send(self, number: int, item: bytes, deadline: float) -> None:
        """Give it a response to score."""
        self.deadlines[number] = deadline
        self._send(Work(number, item))

    def receive(self, limit_s: float) -> Any:
        """Return its next message; None if it ended or none came within the limit."""
        try:
            if limit_s and not self.connection.poll(limit_s):
                return None
            return self.connection.recv()
        except (EOFError, OSError):
            self.ending = self._wait()
            return None

    def settle(self, answer: Answer) -> Answer:
        """Remove a response that it has scored from `deadlines`."""
        del self.deadlines[answer.number]
        self.is_alone = False
        return answer

    def print_stack(self) -> None:
        """Have it write the stacks of its threads to stderr, which is the worker's log."""
        with suppress(ProcessLookupError):
            os.kill(self._process.pid, signal.SIGUSR1)
            time.sleep(_STACK_S)

    def end(self) -> None:
        """End it with everything that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self.ending = self.ending or self._wait()
        self.connection.close()

    def _send(self, message: object) -> None:
        # Where it has ended, or does not read, the next `receive` or the deadline finds out.
        with suppress(OSError):
            self.connection.send(message)

    def _wait(self) -> str:
        """Return how it ended, in words."""
        try:
            code = self._process.wait(_END_LIMIT_S)
        except subprocess.TimeoutExpired:
            return "stopped answering"
        if code >= 0:
            return f"ended with exit code {code}"
        name = signal.Signals(-code).name
        return f"was ended by {name}" + (" (often because memory ran out)" if name == "SIGKILL" else "")
