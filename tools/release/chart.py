"""The chart as a package: helm checks and packs it, with what Artifact Hub shows of this version."""

import gzip
import io
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.release.version import Change, ReleaseError


def package_chart(helm: Path, chart: Path, changes: Sequence[Change], images: Sequence[str], epoch: int) -> bytes:
    """Return the chart's package; the same files and time give the same bytes.

    Raises:
        ReleaseError: helm refused the chart; the message has its words.
    """
    with tempfile.TemporaryDirectory() as aside:
        copy = Path(aside) / chart.name
        shutil.copytree(chart, copy)
        definition = copy / "Chart.yaml"
        definition.write_text(_annotated(definition.read_text(), changes, images))
        _run(helm, "lint", "--strict", str(copy))
        _run(helm, "package", str(copy), f"--destination={aside}")
        (package,) = Path(aside).glob("*.tgz")
        return _with_time(package.read_bytes(), epoch)


def _annotated(text: str, changes: Sequence[Change], images: Sequence[str]) -> str:
    chart: dict[str, Any] = yaml.safe_load(text)
    named = [{"name": image.rpartition("/")[2].partition(":")[0], "image": image} for image in images]
    listed = [{"kind": change.kind, "description": change.description} for change in changes]
    chart["annotations"] |= {
        "artifacthub.io/images": yaml.safe_dump(named, sort_keys=False, width=1000),
        "artifacthub.io/changes": yaml.safe_dump(listed, sort_keys=False, width=1000),
    }
    return yaml.safe_dump(chart, sort_keys=False, width=1000)


def _run(helm: Path, *arguments: str) -> None:
    done = subprocess.run([helm, *arguments], capture_output=True, text=True, timeout=120, check=False)
    if done.returncode != 0:
        raise ReleaseError(f"helm {arguments[0]}: {(done.stderr or done.stdout).strip()}")


def _with_time(package: bytes, epoch: int) -> bytes:
    """Give every file of a package one time, because helm takes the time at which it packed."""
    packed = io.BytesIO()
    with (
        tarfile.open(fileobj=io.BytesIO(package), mode="r:gz") as source,
        gzip.GzipFile(fileobj=packed, mode="wb", mtime=epoch) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as target,
    ):
        for member in source:
            plain = tarfile.TarInfo(member.name)
            plain.size, plain.mode, plain.mtime = member.size, 0o644, epoch
            target.addfile(plain, source.extractfile(member))
    return packed.getvalue()
