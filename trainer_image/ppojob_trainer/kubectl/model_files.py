"""`kubectl ppo model`: copies an exported model from a job's storage to this machine.

    find the folder (status.model) ─▶ list its files ─▶ each file by exec, to disk ─▶ rename
                                                                         part by part, compared with its SHA-256

The folder appears complete or not at all. Called by `app.py`. It refuses to
write into a folder that has something in it.
"""

import hashlib
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from rich.console import Console
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn
from tenacity import Retrying, retry_if_exception_type, stop_after_attempt, wait_fixed

from ppojob_api.v1alpha1.constants import Condition
from ppojob_api.v1alpha1.training import ExportPolicy
from ppojob_trainer.kubectl.client import KubectlError, NotThereError, Raw
from ppojob_trainer.kubectl.run_folder import RunFolder, files_of

PART_BYTES = 256 * 1024 * 1024
"""Bytes that one exec copies: a cut connection costs at most this much."""
_TRIES = 5
_PAUSE_SECONDS = 2.0
_STEP = re.compile(r"step-(\d+)")

OnProgress = Callable[[int, int], object]
"""Called with the bytes that have arrived, and those of all files."""


def exported_folder(job: Raw, step: int | None) -> Path:
    """Return the folder of an export, as the job's pods see it.

    Args:
        job: as the API server has it.
        step: of an export of a job with `export: Each`; None: the newest.

    Raises:
        NotThereError: there is none; the message says why, and what to do.
    """
    model = job.get("status", {}).get("model")
    key = f"{job['metadata']['namespace']}/{job['metadata']['name']}"
    if model is None:
        raise NotThereError(f"{key} has no exported model: {_why(job)}")
    if step is None:
        return Path(PurePosixPath(model["path"]))
    if _policy(job) is not ExportPolicy.EACH:
        raise NotThereError(
            f"{key} has one exported model, {model['path']}: omit --step, which is for jobs with "
            f"spec.checkpoint.export: Each"
        )
    return files_of(job).model_of(step)


def refuse_used(target: Path) -> None:
    """Refuse a folder that has something in it, and what is not a folder.

    Raises:
        ValueError: with the remedy.
    """
    if target.is_dir():
        if any(target.iterdir()):
            raise ValueError(f"-o {target} is not empty: use a new folder, or delete this one first")
    elif target.exists() or target.is_symlink():
        raise ValueError(f"-o {target} is not a folder: use a new folder")


def fetch(folder: RunFolder, source: Path, target: Path, on_progress: OnProgress) -> int:
    """Copy a folder of the storage to `target`; return its size in bytes.

    Raises:
        NotThereError: the folder is not there, or has no model in it.
        KubectlError: it cannot be read, or the copy differs from it.
        ValueError: `target` is in use.
    """
    refuse_used(target)
    sizes = _listed(folder, source)
    total, arrived = sum(sizes.values()), 0
    target.parent.mkdir(parents=True, exist_ok=True)
    if (free := shutil.disk_usage(target.parent).free) < total:
        raise ValueError(
            f"-o {target}: the disk has {free:,} bytes free, and the model has {total:,}: use another disk"
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", dir=target.parent) as aside:
        whole = Path(aside) / "model"
        whole.mkdir()
        for name, size in sizes.items():
            (whole / name).parent.mkdir(parents=True, exist_ok=True)
            _copy(folder, source / name, whole / name, size, _added_to(arrived, total, on_progress))
            arrived += size
        refuse_used(target)
        whole.replace(target)
    return total


def _added_to(before: int, total: int, on_progress: OnProgress) -> Callable[[int], object]:
    return lambda done: on_progress(before + done, total)


def _listed(folder: RunFolder, source: Path) -> dict[str, int]:
    try:
        sizes = folder.sizes(source)
    except NotThereError as error:
        raise NotThereError(f"{error}: {_others(folder, source)}") from error
    odd = [name for name in sizes if name.startswith("/") or ".." in PurePosixPath(name).parts]
    if odd:
        raise KubectlError(
            f"{folder.pod} lists {odd[0]!r}, which is outside of {source}: check that it is this job's pod"
        )
    if "config.json" not in sizes:
        raise NotThereError(f"{source} has no config.json, so it is not an exported model")
    return dict(sorted(sizes.items()))


def _others(folder: RunFolder, source: Path) -> str:
    """Return which exports there are beside one that is not there."""
    try:
        names = {name.partition("/")[0] for name in folder.sizes(source.parent)}
    except NotThereError:
        names = set()
    steps = sorted(int(match[1]) for match in map(_STEP.fullmatch, names) if match)
    if not _STEP.fullmatch(source.name) or not steps:
        return "it was deleted, or is being replaced; run the command again"
    return f"the exports are of steps {', '.join(map(str, steps))} (checkpoint.keep limits them)"


def _copy(folder: RunFolder, source: Path, target: Path, size: int, on_progress: Callable[[int], object]) -> None:
    """Copy a file in parts. Each is compared with its checksum in the pod, and copied again if it is cut or differs."""
    retrying = Retrying(
        retry=retry_if_exception_type(KubectlError),
        stop=stop_after_attempt(_TRIES),
        wait=wait_fixed(_PAUSE_SECONDS),
        reraise=True,
    )
    with target.open("wb") as file:
        for start in range(0, size, PART_BYTES):
            part = _Part(start, min(PART_BYTES, size - start))
            try:
                retrying(_copy_part, folder, source, file, part, on_progress)
            except KubectlError as error:
                raise KubectlError(
                    f"{source} cannot be copied: {error}; no files were kept here. Run the command again"
                ) from error


@dataclass(frozen=True)
class _Part:
    """Bytes of a file."""

    start: int
    length: int


def _copy_part(
    folder: RunFolder, source: Path, file: IO[bytes], part: _Part, on_progress: Callable[[int], object]
) -> None:
    """Write a part of a file.

    Raises:
        KubectlError: it is not what the pod has.
    """
    digest = hashlib.sha256()

    def take(piece: bytes) -> None:
        file.write(piece)
        digest.update(piece)
        on_progress(file.tell())

    file.seek(part.start)
    said = folder.copy(source, part.start, part.length, take)
    arrived = file.tell() - part.start
    if arrived != part.length:
        # Some connections end early without an error.
        raise KubectlError(f"{arrived} of {part.length} bytes from {part.start} on arrived. {said.strip()}".rstrip())
    if digest.hexdigest() not in said:
        raise KubectlError(f"the {part.length} bytes from {part.start} on have another SHA-256 in the pod")


@contextmanager
def transfer(what: str) -> Iterator[OnProgress]:
    """Show on a terminal how much of a transfer has arrived; not elsewhere, where nobody watches."""
    console = Console(stderr=True)
    columns = (*Progress.get_default_columns(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=None)
        yield lambda done, total: progress.update(task, completed=done, total=total)


def _policy(job: Raw) -> ExportPolicy:
    return ExportPolicy(job["spec"].get("checkpoint", {}).get("export", ExportPolicy.FINAL))


def _why(job: Raw) -> str:
    """Return why a job has no exported model, and what to do."""
    status, policy = job.get("status", {}), _policy(job)
    saved = status.get("checkpoint")
    from_checkpoint = (
        f"create another job with checkpoint.resumeFrom: {saved['path']} and checkpoint.export: Final"
        if saved
        else "there is no checkpoint to export from, either"
    )
    if policy is ExportPolicy.NEVER:
        return f"spec.checkpoint.export is Never; {from_checkpoint}"
    true = {each["type"]: each for each in status.get("conditions", []) if each["status"] == "True"}
    if Condition.FAILED in true:
        return f"it has failed ({true[Condition.FAILED]['reason']}) before it was exported; {from_checkpoint}"
    progress = status.get("progress", {})
    steps = f"{progress.get('step', 0)} of {progress.get('totalSteps', '?')} steps are done"
    when = "with the first checkpoint" if policy is ExportPolicy.EACH else "after the last step"
    return f"{steps}, and spec.checkpoint.export is {policy.value}: it is exported {when}"
