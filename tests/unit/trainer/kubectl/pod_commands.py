"""A program `kubectl`: it answers from files, and runs the command of an `exec` in a shell of this machine.

    python pod_commands.py FOLDER ARGUMENTS...

FOLDER has `jobs.json` and `pods.json`, what `get` answers, and `log`, with the first words of each command. If
it has `cut`, the next `exec` passes on only that many bytes, and fails if the file says so: `1000 fail`. If it has
`garble`, the next `exec` changes a byte.
"""

import json
import subprocess
import sys
from pathlib import Path


def run(folder: Path, arguments: list[str]) -> int:
    with (folder / "log").open("a") as log:
        log.write(f"{' '.join(arguments[:3])}\n")
    verb = arguments[0]
    if verb == "get":
        found = json.loads((folder / ("pods.json" if arguments[1] == "pods" else "jobs.json")).read_text())
        print(json.dumps(found))
    if verb == "create":
        (folder / "created.json").write_text(sys.stdin.read())
    return execute(folder, arguments[arguments.index("--") + 1 :]) if verb == "exec" else 0


def execute(folder: Path, command: list[str]) -> int:
    done = subprocess.run(command, capture_output=True, check=False)
    out, code = done.stdout, done.returncode
    is_copy = "hashlib" in command[-1]
    cut, garble = folder / "cut", folder / "garble"
    if is_copy and cut.exists():
        length, _, fails = cut.read_text().partition(" ")
        cut.unlink()
        out, code = out[: int(length)], 1 if fails else 0
        done.stderr = b"error: connection lost" if fails else done.stderr
    if is_copy and garble.exists():
        garble.unlink()
        out = bytes([out[0] ^ 1]) + out[1:]
    sys.stdout.buffer.write(out)
    sys.stderr.buffer.write(done.stderr)
    if code and not done.stderr:
        sys.stderr.write(f"command terminated with exit code {code}\n")
    return code


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1]), sys.argv[2:]))
