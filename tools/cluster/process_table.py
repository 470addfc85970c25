"""All processes of this machine, ours or not, read from /proc. It only reads.

Called by `preflight`, `leftovers` and the test suite.
A process that ends while it is read, or that may not be read, is left out.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
_SHOWN_CHARACTERS = 200
SHIM = "containerd-shim-runc-v2"
_LISTENING = "0A"
_SOCKET = "socket:["


@dataclass(frozen=True)
class Running:
    """A process with its command line."""

    pid: int
    arguments: tuple[str, ...]

    @property
    def words(self) -> list[str]:
        """The command line, split at spaces too: some programs write their title as one argument."""
        return " ".join(self.arguments).split()

    @property
    def shown(self) -> str:
        """The beginning of the command line, for people."""
        return " ".join(self.words)[:_SHOWN_CHARACTERS]


def pids() -> Iterator[int]:
    """The ids of all processes but this one."""
    for folder in PROC.iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            yield int(folder.name)


def running() -> list[Running]:
    """Every process that has a command line; kernel threads and zombies have none."""
    found = (read(pid) for pid in pids())
    return [process for process in found if process is not None]


def read(pid: int) -> Running | None:
    """The process with this id; None if there is none, or it has no command line."""
    with contextlib.suppress(OSError):
        arguments = (PROC / str(pid) / "cmdline").read_bytes().decode(errors="replace").rstrip("\0")
        return Running(pid, tuple(arguments.split("\0"))) if arguments else None
    return None


def shares_network(pid: int) -> bool:
    """True if the process is in this process's network namespace: one in another container is not."""
    with contextlib.suppress(OSError):
        return os.readlink(PROC / str(pid) / "ns/net") == os.readlink(PROC / "self/ns/net")
    return False


def listeners(ports: Collection[int]) -> dict[int, int | None]:
    """Those of the TCP ports on which a process listens, at any address, and its id; None if it cannot be seen."""
    sockets = {inode: port for port, inode in _listening() if port in ports}
    found: dict[int, int | None] = dict.fromkeys(sockets.values())
    for pid in pids() if sockets else ():
        for inode in sockets.keys() & _sockets_of(pid):
            found[sockets[inode]] = pid
    return found


def _listening() -> Iterator[tuple[int, str]]:
    """The port and the inode of each listening socket."""
    tables = (PROC / "self/net" / name for name in ("tcp", "tcp6"))
    for line in (line for table in tables if table.is_file() for line in table.read_text().splitlines()[1:]):
        fields = line.split()
        if fields[3] == _LISTENING:
            yield int(fields[1].rpartition(":")[2], 16), fields[9]


def _sockets_of(pid: int) -> set[str]:
    """The inodes of the sockets that a process has open."""
    with contextlib.suppress(OSError):
        targets = [_target(descriptor) for descriptor in (PROC / str(pid) / "fd").iterdir()]
        return {target.removeprefix(_SOCKET).removesuffix("]") for target in targets if target.startswith(_SOCKET)}
    return set()


def _target(link: Path) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(link)
    return ""
