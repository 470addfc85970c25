"""Replaces every program on PATH that a script must not start: writes one line of JSON, prints nothing, succeeds.

Started as a separate program, with only the standard library: recorder.py FILE NAME ARGUMENTS... A question for
Ascend's NPUs fails, because a PPOJob runs on CUDA: scripts ask by importing torch_npu, and use the exit code.
"""

from __future__ import annotations

import json
import os
import stat
import sys


def main(file: str, name: str, *arguments: str) -> int:
    """Append what was called, where in which script, and whether something reads the output, which is empty."""
    is_piped = stat.S_ISFIFO(os.fstat(1).st_mode)
    line = {"words": [name, *arguments], "at": os.environ.get("PPOJOB_AT", ""), "is_piped": is_piped}
    # One write to a file opened for appending: lines of processes in the background do not mix.
    with open(file, "ab", buffering=0) as out:
        out.write(json.dumps(line).encode() + b"\n")
    return 1 if "-c" in arguments and any("torch_npu" in word for word in arguments) else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
