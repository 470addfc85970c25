"""kubectl as a program: contexts, credentials, proxies and exec plugins are its own, and work as the user knows them.

`app.py` makes one for each command. It knows no PPOJob, and never logs.
"""

import json
import os
import selectors
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Protocol

Raw = dict[str, Any]
"""An object of the API server as decoded JSON."""

_LIMIT_SECONDS = 120.0
_INTERRUPTED = 130
_PIECE_BYTES = 1024 * 1024


class KubectlError(RuntimeError):
    """kubectl refused or failed; the message has its own words."""


class NotThereError(ValueError):
    """The job has not created the requested object, or has released it."""


class Cluster(Protocol):
    """What the commands need of a cluster."""

    def get(self, kind: str, /, *arguments: str) -> Any:
        """Return what `kubectl get` gives, decoded."""

    def output(self, *arguments: str, stdin: str | None = None) -> bytes:
        """Return what a kubectl command prints."""

    def stream(self, *arguments: str, into: Callable[[bytes], object]) -> bytes:
        """Pass what a kubectl command prints on to `into`, piece by piece; return what it says on stderr."""

    def attach(self, *arguments: str) -> int:
        """Run a kubectl command on the user's own terminal; return its exit status."""


def get_again(cluster: Cluster, kind: str, namespace: str, name: str, uid: str) -> Raw:
    """Return an object that was read before.

    Raises:
        NotThereError: it was deleted, and another object has its name.
        KubectlError: with kubectl's words.
    """
    found: Raw = cluster.get(kind, name, f"--namespace={namespace}")
    if found["metadata"]["uid"] != uid:
        raise NotThereError(f"{namespace}/{name} was deleted; another job has its name now")
    return found


class Kubectl:
    """kubectl on PATH."""

    def __init__(self, *, context: str | None = None, namespace: str | None = None) -> None:
        """Where nothing is given, the kubeconfig says it."""
        given = {"--context": context, "--namespace": namespace}
        self._command = ["kubectl", *(f"{name}={value}" for name, value in given.items() if value)]

    def get(self, *arguments: str) -> Any:
        """Return what `kubectl get` gives, decoded.

        Raises:
            KubectlError: with kubectl's words.
        """
        return json.loads(self.output("get", *arguments, "--output=json"))

    def output(self, *arguments: str, stdin: str | None = None) -> bytes:
        """Return what a kubectl command prints.

        Raises:
            KubectlError: with kubectl's words.
        """
        with _found():
            done = subprocess.run(
                [*self._command, *arguments],
                input=None if stdin is None else stdin.encode(),
                stdin=subprocess.DEVNULL if stdin is None else None,
                capture_output=True,
                timeout=_LIMIT_SECONDS,
                check=False,
            )
        if done.returncode != 0:
            raise KubectlError(_words(arguments, done.stderr))
        return done.stdout

    def stream(self, *arguments: str, into: Callable[[bytes], object]) -> bytes:
        """Pass what a kubectl command prints on to `into`, piece by piece; return what it says on stderr.

        It may take as long as it likes, but must not be silent for `_LIMIT_SECONDS`.

        Raises:
            KubectlError: with kubectl's words.
        """
        with _found(), tempfile.TemporaryFile() as errors:
            command = [*self._command, *arguments]
            with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=errors) as process:
                try:
                    assert process.stdout is not None, "it is a pipe"
                    _pass_on(process.stdout, command, into)
                    code = process.wait(_LIMIT_SECONDS)
                finally:
                    # If `into` fails, nobody reads the rest.
                    process.kill()
            errors.seek(0)
            said = errors.read()
        if code != 0:
            raise KubectlError(_words(arguments, said))
        return said

    def attach(self, *arguments: str) -> int:
        """Run a kubectl command on the user's own terminal until it ends or is interrupted; return its exit status.

        Raises:
            KubectlError: there is no kubectl.
        """
        with _found(), subprocess.Popen([*self._command, *arguments], stdin=subprocess.DEVNULL) as process:
            try:
                return process.wait()
            except KeyboardInterrupt:
                # The terminal sends the signal to kubectl too.
                process.wait()
                return _INTERRUPTED


def _pass_on(pipe: IO[bytes], command: Sequence[str], into: Callable[[bytes], object]) -> None:
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while True:
            if not selector.select(_LIMIT_SECONDS):
                raise subprocess.TimeoutExpired(command, _LIMIT_SECONDS)
            # Not `pipe.read`, which would wait for the whole piece.
            piece = os.read(pipe.fileno(), _PIECE_BYTES)
            if not piece:
                return
            into(piece)


@contextmanager
def _found() -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise KubectlError("kubectl is not on PATH: install it, or add its folder") from error
    except subprocess.TimeoutExpired as error:
        raise KubectlError(
            f"kubectl did not answer within {_LIMIT_SECONDS:g} s: check that the cluster is reachable"
        ) from error


def _words(arguments: Sequence[str], said: bytes) -> str:
    text = said.decode(errors="replace").strip()
    return text.removeprefix("error: ") or f"kubectl {' '.join(arguments)} failed without a message"
