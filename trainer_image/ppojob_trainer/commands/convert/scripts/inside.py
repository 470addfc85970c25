"""The first process in the sandbox. Where bwrap did not, it makes the file system read-only; then it runs bash.

Started as a separate program, with only the standard library. It waits for every process that the script left in
the background, because a launch with `&` is a launch too, and ends with bash's exit code.
"""

from __future__ import annotations

import ctypes
import errno
import json
import os
import resource
import struct
import sys
from pathlib import Path

LARGEST_FILE_BYTES = 64 << 20
_KEPT_DEVICES = ("null", "zero", "urandom", "random")
# Numbers of the kernel's interface, the same on all architectures that have mount_setattr(2): Linux 5.12 and newer.
_MOUNT_SETATTR, _AT_FDCWD, _AT_RECURSIVE = 442, -100, 0x8000
_READ_ONLY, _NO_SUID, _NO_DEVICES = 1, 2, 4
_MS_BIND, _MS_RECURSIVE, _MS_PRIVATE = 0x1000, 0x4000, 0x40000
_PR_CAPBSET_DROP, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS, _LAST_CAPABILITY = 24, 36, 38, 63


def main(given: str) -> int:
    """Run `command` in `folder`; only below `work` may anything be written."""
    settings = json.loads(given)
    libc = ctypes.CDLL(None, use_errno=True)
    if settings["closes"]:
        _close(libc, Path(settings["work"]))
    if sys.platform == "linux":
        libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LARGEST_FILE_BYTES, LARGEST_FILE_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.chdir(settings["folder"])
    command = os.fork()
    if command == 0:
        os.execve(settings["command"][0], settings["command"], settings["environment"])
    code = 0
    while True:
        try:
            process, status = os.wait()
        except ChildProcessError:
            return code
        if process == command:
            code = os.waitstatus_to_exitcode(status)


def _close(libc: ctypes.CDLL, work: Path) -> None:
    """Make every mount read-only but `work`; leave harmless devices, no sockets of services, and no capabilities."""
    devices = work / "devices"
    devices.mkdir()
    _mount(libc, None, "/", None, _MS_PRIVATE | _MS_RECURSIVE)
    _mount(libc, work, work, None, _MS_BIND | _MS_RECURSIVE)
    _mount(libc, None, devices, "tmpfs", 0)
    for name in _KEPT_DEVICES:
        (devices / name).touch()
        _mount(libc, f"/dev/{name}", devices / name, None, _MS_BIND)
    (devices / "fd").symlink_to("/proc/self/fd")
    _set_attributes(libc, Path("/"), _READ_ONLY | _NO_SUID | _NO_DEVICES, 0, _AT_RECURSIVE)
    _set_attributes(libc, work, 0, _READ_ONLY, 0)
    for name in _KEPT_DEVICES:
        _set_attributes(libc, devices / name, 0, _READ_ONLY | _NO_DEVICES, 0)
    _mount(libc, devices, "/dev", None, _MS_BIND | _MS_RECURSIVE)
    if Path("/run").is_dir():
        _mount(libc, None, "/run", "tmpfs", 0)
    # With them, the script could make the mounts writable again.
    for capability in range(_LAST_CAPABILITY + 1):
        libc.prctl(_PR_CAPBSET_DROP, capability, 0, 0, 0)


def _mount(libc: ctypes.CDLL, source: str | Path | None, target: str | Path, kind: str | None, flags: int) -> None:
    what = None if source is None else os.fsencode(source)
    form = None if kind is None else kind.encode()
    _checked(libc.mount(what, os.fsencode(target), form, ctypes.c_ulong(flags), None), target)


def _set_attributes(libc: ctypes.CDLL, target: Path, added: int, removed: int, flags: int) -> None:
    attributes = struct.pack("=QQQQ", added, removed, 0, 0)
    arguments = (_AT_FDCWD, os.fsencode(target), flags, attributes, ctypes.c_size_t(len(attributes)))
    _checked(libc.syscall(ctypes.c_long(_MOUNT_SETATTR), *arguments), target)


def _checked(result: int, target: str | Path) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, errno.errorcode.get(number, ""), str(target))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
