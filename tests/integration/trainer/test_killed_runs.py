"""`ppojob run`, killed by SIGKILL, ends with the numbers of a run that nobody disturbed.

Real processes on CPU: Ray, FSDP2, vLLM, two pools in Overlapped, checkpoints in the background; the model is tiny. The
data is a mixture of two sources, each of which is passed more than once. The undisturbed run writes its checkpoints in
the foreground, so that the two ways of saving are compared too. Kills at other moments are tested without Ray
(tests/unit/trainer/checkpoints/test_kills.py).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.integration.trainer.runs import (
    LIMIT_S,
    PROGRAM,
    STEPS,
    Run,
    assert_same_steps,
    assert_same_weights,
    checkpointed_spec,
    kill,
    log_of,
    records_of,
    started,
    wait_until,
)

pytestmark = [pytest.mark.timeout(2400), pytest.mark.slow, pytest.mark.long]


COMMITS_ONE_STEP = f"""
import threading
from ppojob_trainer.checkpoints.folder_store import FolderStore

commit = FolderStore.commit

def held(store, step, **options):
    if step == 2:
        threading.Event().wait()
    return commit(store, step, **options)

FolderStore.commit = held
{PROGRAM}
"""
"""`ppojob run` that never completes its second checkpoint: a save takes milliseconds, in which a test may not run."""


def test_a_run_killed_inside_a_save_has_the_metrics_of_one_that_was_not(
    undisturbed: Run, model: Path, tmp_path: Path
) -> None:
    in_background = checkpointed_spec(model)
    with started(tmp_path, in_background, COMMITS_ONE_STEP) as run:
        wait_until(
            lambda: any((tmp_path / "checkpoints").glob(".step-2.tmp-0/*/*")), run, "inside the second save", tmp_path
        )
        kill(run)
    assert max(records_of(tmp_path)) < STEPS, "the kill came before the end"

    with started(tmp_path, {**in_background, "trainer": {**in_background["trainer"], "dataWorkers": 2}}) as run:
        assert run.wait(LIMIT_S) == 0, log_of(tmp_path)

    assert "attempt 1" in log_of(tmp_path)
    found = Run(tmp_path)
    assert_same_steps(found, undisturbed, rel=1e-4, absolute=1e-6)
    assert_same_weights(found, undisturbed, model)
    assert [found.records[step]["training/epoch"] for step in (1, 2, 3)] == [0, 1, 2]
    assert [round(8 * found.records[step]["mixture/sums/share"]) for step in (1, 2, 3)] == [2, 3, 3]
    tracker = json.loads((tmp_path / "checkpoints" / "tracker.json").read_text())
    assert tracker["step"] == STEPS
    assert not list((tmp_path / "checkpoints").glob(".step-*")), "what the kill left half done is gone"


def test_a_checkpoint_that_lost_a_file_is_refused_with_the_older_one(
    undisturbed: Run, model: Path, tmp_path: Path
) -> None:
    root = tmp_path / "run"
    shutil.copytree(undisturbed.root, root)
    newest = root / "checkpoints" / f"step-{STEPS}"
    victim = next((newest / "critic").glob("*.distcp"))
    victim.unlink()

    with started(root, checkpointed_spec(model)) as run:
        assert run.wait(LIMIT_S) == 1

    error = log_of(root).splitlines()
    named = [line for line in error if line.startswith("error: CheckpointUnreadable: ")]
    assert len(named) == 1, error[-20:]
    assert f"checkpoint {newest} cannot be read: critic/{victim.name} is missing" in named[0]
    older = newest.with_name(f"step-{STEPS - 1}")
    assert f"to resume from step {STEPS - 1}, set checkpoint.resumeFrom to {older}" in named[0]
