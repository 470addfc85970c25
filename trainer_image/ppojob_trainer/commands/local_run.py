"""The parts of `ppojob run` besides the training: the job file, the fetch, the attempt number, Ctrl-C.

A run on one machine has no operator, so this module makes the operator's decisions.
"""

import hashlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.sources import localized
from ppojob_trainer.checkpoints import last_attempt
from ppojob_trainer.commands.local_paths import localize
from ppojob_trainer.commands.manifest import Manifest

_COURSE = ("data", "reward", "workers", "algorithm", "actor", "critic", "rollout")
"""Sections that determine what a run computes; where and for how long it computes may change between attempts."""


def job_file(manifest: Manifest, output: Path, storage: Path | None) -> JobFile:
    """Return the resolved job, with the paths of this machine.

    Args:
        output: the run's own folder.
        storage: folder that replaces spec.storage; None: `storage` in `output`, or next to it.

    Raises:
        SpecError: a path of the spec is not on this machine.
    """
    root = output.absolute()
    storages = [storage.absolute()] if storage else [root / "storage", root.parent / "storage"]
    spec = resolve(localize(manifest.spec, storages))
    # Beside the run's folder, other runs find what was fetched.
    place = next((folder for folder in storages if folder.exists()), storages[-1])
    spec, sources = localized(spec, str(place))
    spec = spec.model_copy(update={"storage": spec.storage.model_copy(update={"mount_path": str(place)})})
    uid = _uid(manifest)
    return JobFile(
        namespace=manifest.namespace, name=manifest.name, uid=uid, root=str(root), spec=spec, sources=sources
    )


def fetch(job: JobFile, show: Callable[[str], None]) -> None:
    """Fetch what the job names by address; `show` gets a line every few seconds.

    Raises:
        FetchError: it could not be fetched.
    """
    # huggingface_hub takes a second, and most runs have no address.
    from ppojob_trainer.commands.fetch import State, fetch_all
    from ppojob_trainer.commands.fetch.report import line_of, watched

    Path(job.spec.storage.mount_path).mkdir(parents=True, exist_ok=True)
    state = State()
    with watched(state, lambda state: show(line_of(state))):
        fetch_all(job, state, f"ppojob run {job.name} on {socket.gethostname()}")
    for source in state.sources:
        show(f"{source.address} is in {source.path}")


def next_attempt(checkpoints: str) -> int:
    """Return the number after the last attempt that wrote checkpoints there; 0 for the first.

    Raises:
        BucketError: they are in a bucket, which cannot be read.
    """
    last = last_attempt(checkpoints)
    return 0 if last is None else last + 1


@contextmanager
def stop_on_interrupt() -> Iterator[threading.Event]:
    """Yield an event that the first Ctrl-C (or SIGTERM) sets; the second Ctrl-C ends the program at once."""
    stop = threading.Event()

    def ask_to_stop(number: int, frame: FrameType | None) -> None:
        if stop.is_set():
            raise KeyboardInterrupt
        stop.set()
        sys.stderr.write("\nstopping after the current step; Ctrl-C again ends the run at once\n")

    before = {number: signal.signal(number, ask_to_stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _uid(manifest: Manifest) -> str:
    """Return a substitute for the object's UID: equal sections resume the same run, changed ones are another run.

    This follows the operator's rule that these sections cannot change once a job is accepted.
    """
    raw = manifest.spec.to_wire()
    course = {section: raw.get(section) for section in _COURSE} | {"seed": manifest.spec.trainer.seed}
    models = {role: model.get("path") for role, model in raw["model"].items()}
    text = json.dumps([manifest.namespace, manifest.name, course, models], sort_keys=True)
    return f"local-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
