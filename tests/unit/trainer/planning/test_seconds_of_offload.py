"""Seconds of offloaded tensors: of the copies before and after a phase for which the GPU waits."""

from dataclasses import replace
from pathlib import Path

import pytest

from ppojob_trainer.planning import comparison
from ppojob_trainer.planning.gpus import GPUS
from ppojob_trainer.planning.measured_runs import MeasuredRun
from ppojob_trainer.planning.seconds import TimedRun, seconds_of
from ppojob_trainer.planning.workload import Workload
from tests.unit.trainer.planning.jobs import write_config
from tests.unit.trainer.planning.stubs import H200, MB, plan, work_of

ACTOR_MOMENTS, ACTOR_WEIGHTS = 20 * MB, 10 * MB
REF_WEIGHTS = 5 * MB
BYTES_PER_S = 0.7 * 64e9


def work_with(folder: Path, **models: object) -> Workload:
    path = write_config(folder)
    sections = {"actor": {"path": path, **dict(models.pop("actor", {}))}, **models}  # type: ignore[call-overload]
    return work_of(plan(folder, model=sections))


def test_an_update_waits_only_for_the_way_back_of_moments(tmp_path: Path) -> None:
    work = work_with(tmp_path, actor={"offload": {"optimizer": True}})
    assert work.host_bytes == {"update_actor": ACTOR_MOMENTS}


def test_parameters_are_copied_for_each_phase_and_back_after_an_update(tmp_path: Path) -> None:
    work = work_with(
        tmp_path, actor={"offload": {"parameters": True, "optimizer": True}}, ref={"offload": {"parameters": True}}
    )
    assert work.host_bytes == {
        "old_log_prob": ACTOR_WEIGHTS,
        "ref": REF_WEIGHTS,
        "update_actor": 2 * ACTOR_WEIGHTS + ACTOR_MOMENTS,
    }


@pytest.mark.parametrize("waits", [False, True])
def test_runs_of_before_waited_for_both_ways_of_moments(tmp_path: Path, waits: bool) -> None:
    models = {"actor": {"path": write_config(tmp_path), "offload": {"optimizer": True}}}
    found = comparison._workload(MeasuredRun("run", {}, waits_for_moments=waits), plan(tmp_path, model=models))
    assert found.host_bytes["update_actor"] == (2 if waits else 1) * ACTOR_MOMENTS


def test_nothing_is_copied_without_offload(tmp_path: Path) -> None:
    assert work_with(tmp_path).host_bytes == {}


@pytest.mark.parametrize("gpu", ["H200", "A100"])
def test_copies_take_their_time_beside_what_runs_without_them_took(tmp_path: Path, gpu: str) -> None:
    found = plan(tmp_path)
    plain = replace(work_with(tmp_path), host_bytes={})
    copied = replace(plain, host_bytes={"update_actor": BYTES_PER_S})
    runs = [TimedRun(plain, {"update_actor": 8.0, "update_critic": 4.0}, H200)]

    without, seconds = (seconds_of(found.spec, work, GPUS[gpu], runs).phases for work in (plain, copied))

    # 64 GB/s from and to an H200, and half of it from and to an A100.
    assert seconds["update_actor"] - without["update_actor"] == pytest.approx(1.0 if gpu == "H200" else 2.0)
    assert seconds["update_critic"] == without["update_critic"]


def test_a_run_with_copies_predicts_one_without_them(tmp_path: Path) -> None:
    found = plan(tmp_path)
    plain = replace(work_with(tmp_path), host_bytes={})
    copied = replace(plain, host_bytes={"update_actor": BYTES_PER_S})

    seconds = seconds_of(found.spec, plain, H200, [TimedRun(copied, {"update_actor": 8.0}, H200)]).phases

    assert seconds["update_actor"] == pytest.approx(7.0)
