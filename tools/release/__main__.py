"""`python -m tools.release`: write a release into dist/. `make release` calls it; nothing is uploaded.

dist/ gets the sdist, the wheel, the chart's package, images.txt with the names of the images, and SHA256SUMS of all of
them. The same commit gives the same bytes: every file has the commit's time, or that of SOURCE_DATE_EPOCH.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tools.cluster.layout import Layout
from tools.release.chart import package_chart
from tools.release.version import IMAGES, PROJECT, ReleaseError, changes_of, project_version

CHART = PROJECT / "charts" / "ppojob"


def main() -> int:
    """Make the release; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tools.release", description="Write a release into a folder.")
    parser.add_argument("--output", type=Path, default=PROJECT / "dist", help="emptied first (default: dist)")
    parser.add_argument("--registry", default=os.environ.get("REGISTRY", ""), help="where the images are pushed to")
    arguments = parser.parse_args()
    try:
        for path in release(arguments.output, arguments.registry):
            sys.stdout.write(f"{path}\n")
    except ReleaseError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    return 0


def release(output: Path, registry: str = "") -> list[Path]:
    """Write the release and return its files.

    Raises:
        ReleaseError: CHANGELOG.md says nothing of the version, or a tool refused.
    """
    version = project_version((PROJECT / "pyproject.toml").read_text())
    changes = changes_of(version, (PROJECT / "CHANGELOG.md").read_text())
    images = [f"{registry.rstrip('/')}/{name}:{version}".lstrip("/") for name in IMAGES]
    epoch = _epoch()
    shutil.rmtree(output, ignore_errors=True)
    output.mkdir(parents=True)
    _build_package(output, epoch)
    chart = package_chart(_tool("helm"), CHART, changes, images, epoch)
    (output / f"ppojob-{version}.tgz").write_bytes(chart)
    (output / "images.txt").write_text("".join(f"{image}\n" for image in images))
    files = sorted(path for path in output.iterdir() if not path.name.startswith("."))
    sums = "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)
    (output / "SHA256SUMS").write_text(sums)
    return [*files, output / "SHA256SUMS"]


def _build_package(output: Path, epoch: int) -> None:
    command = [str(_tool("uv")), "build", "--quiet", f"--out-dir={output}", str(PROJECT)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(epoch)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"uv build: {done.stderr.strip()}")


def _epoch() -> int:
    if given := os.environ.get("SOURCE_DATE_EPOCH"):
        return int(given)
    command = ["git", "log", "--max-count=1", "--format=%ct"]
    done = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=60, check=False)
    if done.returncode != 0:
        raise ReleaseError("the time of the commit is unknown: call it in a clone, or set SOURCE_DATE_EPOCH")
    return int(done.stdout)


def _tool(name: str) -> Path:
    """Return helm or uv: from the PATH, or as the Makefile puts it."""
    made = {"helm": Layout.from_environment().cache / "bin" / "helm", "uv": PROJECT / ".build" / "uv" / "bin" / "uv"}
    found = shutil.which(name) or shutil.which(made[name])
    if found is None:
        raise ReleaseError(f"{name} is missing: call make release, which brings it")
    return Path(found)


if __name__ == "__main__":
    sys.exit(main())
