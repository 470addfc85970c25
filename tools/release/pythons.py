"""`python -m tools.release.pythons VERSION...`: the project on other versions of Python, in their environments.

`make python-versions` calls it. It installs requirements/dev.txt and the project, imports every module of the three
packages but those that need a GPU, and runs the unit tests that are quick and use no processes.
"""

import os
import subprocess
import sys
from pathlib import Path

from tools.release.version import PROJECT

TESTS = (
    "tests/unit/api",
    "tests/unit/operator",
    "tests/unit/trainer/cli",
    "tests/unit/trainer/controller",
    "tests/unit/trainer/data",
    "tests/unit/trainer/kubectl",
    "tests/unit/trainer/maths",
    "tests/unit/trainer/protocol",
    "tests/unit/trainer/rewards",
    "tests/unit/trainer/telemetry",
    "tests/unit/trainer/worker_groups",
)
# What these import is on machines with a GPU only, or runs a program when it is imported.
_NOT_IMPORTED = ("ppojob_trainer.maths.softmax_cuda", ".fsdp.experts_cuda", ".__main__")
_IMPORT_ALL = f"""
import importlib, pkgutil, ppojob_api, ppojob_operator, ppojob_trainer
count = 0
for package in (ppojob_api, ppojob_operator, ppojob_trainer):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith({_NOT_IMPORTED!r}):
            importlib.import_module(module.name)
            count += 1
print(count, "modules imported")
"""


def main() -> int:
    """Try each version; return 1 if one failed."""
    versions = sys.argv[1:]
    if not versions:
        sys.stderr.write("error: name versions of Python, such as 3.12 3.13\n")
        return 2
    failed = [version for version in versions if not works_on(version)]
    sys.stdout.write(
        f"failed on Python {', '.join(failed)}\n" if failed else f"works on Python {', '.join(versions)}\n"
    )
    return int(bool(failed))


def works_on(version: str) -> bool:
    """Install, import and test the project on one version; what the commands print goes to the terminal."""
    folder = PROJECT / ".build" / f"python-{version}"
    python = str(folder / "bin" / "python")
    uv = os.environ.get("UV", "uv")
    install = (uv, "pip", "install", "--quiet", f"--python={python}", "--no-deps")
    commands = (
        # In another folder, because pyproject.toml keeps triton away, also from requirements that name it.
        ((uv, "venv", "--quiet", "--clear", f"--python={version}", str(folder)), PROJECT),
        ((*install, "--require-hashes", f"--requirement={PROJECT / 'requirements' / 'dev.txt'}"), Path("/")),
        ((*install, f"--editable={PROJECT}"), PROJECT),
        ((python, "-c", _IMPORT_ALL), folder),
        ((python, "-m", "pytest", "-q", "-m", "not slow", "--numprocesses=2", "--dist=loadfile", *TESTS), PROJECT),
    )
    for command, place in commands:
        sys.stdout.write(f"> Python {version}: {' '.join(command[:6])[:150]}\n")
        sys.stdout.flush()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
        if subprocess.run(command, cwd=place, env=environment, check=False).returncode != 0:
            return False
    return True


if __name__ == "__main__":
    sys.exit(main())
