"""The memory of small roles, measured once in a process: the tests of a file ask for the same work again and again.

A test that changes how a role is computed calls `role_memory` itself.
"""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from ppojob_trainer.planning import plan_job
from ppojob_trainer.planning.measured_once import measured_once
from ppojob_trainer.planning.role_memory import measure_stage
from ppojob_trainer.planning.work import Measured, Work
from tests.unit.trainer.planning.jobs import job, write_config
from tests.unit.trainer.planning.stubs import H200

measure = measured_once()
_OF_STAGES = [measured_once(partial(measure_stage, stage=stage)) for stage in range(3)]


def let_commands_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `ppojob plan` find what other calls of it have measured in this process."""
    monkeypatch.setattr("ppojob_trainer.planning.measured_once.measured_once", lambda: measure)


def measured_stages(work: Work) -> Sequence[Measured]:
    """Return what each stage of a pipeline needs."""
    return [_OF_STAGES[stage](work) for stage in range(work.dims.pipeline)]


def measure_parameters(folder: Path) -> int:
    """Return the parameters of the small job's actor."""
    found = plan_job(job(write_config(folder)), {"all": H200}, runner=measure)
    return found.roles["actor"].measured.num_parameters
