"""A storage that refuses the folder of a checkpoint fails the attempt by name, as one that refuses a rank's file."""

import errno
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.engines.errors import CheckpointUnwritableError
from ppojob_trainer.main.checkpoints import JobCheckpoints
from ppojob_trainer.main.failures import failure_record
from tests.good_spec import GOOD


def refused(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", "/data/ppojob/ns/job/checkpoints/.step-4.tmp-0")


def checkpoints_in(**store: Any) -> JobCheckpoints:
    without_ranks = SimpleNamespace(actor=None, critic=None)
    spec = resolve(parse_spec(GOOD["spec"]))
    return JobCheckpoints(cast("Any", SimpleNamespace(**store)), cast("Any", without_ranks), spec, None)


async def test_a_folder_that_cannot_be_created_is_named() -> None:
    with pytest.raises(
        CheckpointUnwritableError, match=r"step 4 .*No space left on device.*step-4.*free space"
    ) as found:
        await checkpoints_in(begin=refused).stage(4, in_background=False, batches=[])

    assert failure_record(found.value).reason == "CheckpointUnwritable"


async def test_a_folder_that_cannot_be_completed_is_named() -> None:
    with pytest.raises(CheckpointUnwritableError, match="earlier checkpoints are complete"):
        await checkpoints_in(commit=refused).commit(4, {}, 1)
