"""Seconds of mixtures of experts, and of pushes to engines that reload their weights.

A mixture's operations are computed at the rate of dense models; the rows for experts take further seconds.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.planning import Plan, plan_job
from ppojob_trainer.planning.comparison import timed_runs
from ppojob_trainer.planning.gpus import GPUS
from ppojob_trainer.planning.seconds import TimedRun, seconds_of
from ppojob_trainer.planning.work import Measured, Work
from ppojob_trainer.planning.workload import workload_of
from tests.unit.trainer.planning.jobs import HIDDEN, job, write_config, write_experts
from tests.unit.trainer.planning.stubs import H200, plan, stub, work_of

SEQUENCES, LENGTH, EXPERT_LAYERS, OF_A_TOKEN = 32, 128, 3, 2


def mixture(folder: Path, **sections: Any) -> Plan:
    """Plan a job of a mixture whose layers all have experts, two of them for each token."""

    def runner(work: Work) -> Measured:
        return replace(stub(work), num_parameters=10**9, layer_parameters=1e9, expert_layers=EXPERT_LAYERS)

    spec = job(write_experts(folder), **sections)
    return plan_job(spec, {"all": H200}, runner=runner)


def test_rows_by_hand(tmp_path: Path) -> None:
    """An update has the rows of a pass three times: forward, computed again, and their gradients."""
    work = work_of(mixture(tmp_path))
    of_pass = SEQUENCES * LENGTH * OF_A_TOKEN * HIDDEN * 2 * EXPERT_LAYERS
    assert work.expert_bytes == {
        "old_log_prob": of_pass,
        "values": of_pass,
        "ref": of_pass,
        "update_critic": 3 * of_pass,
        "update_actor": 3 * of_pass,
    }
    model = {"actor": {"path": write_experts(tmp_path), "gradientCheckpointing": False}}
    again = work_of(mixture(tmp_path, model=model, algorithm={"epochs": 2}))
    assert again.expert_bytes["update_actor"] == 2 * 2 * of_pass


def test_an_update_has_the_gradients_of_adapters_in_addition(tmp_path: Path) -> None:
    found = mixture(tmp_path, model={"actor": {"path": write_experts(tmp_path), "lora": {"rank": 4}}})
    measured = {name: one.measured for name, one in found.roles.items()}
    roles = {name: one.role for name, one in found.roles.items()}
    active = {"actor": replace(measured["actor"], layer_adapters=1e6)}
    plain, adapted = (workload_of(found.spec, roles, measured | more).operations for more in ({}, active))
    apart = {phase: adapted[phase] - number for phase, number in plain.items() if adapted[phase] != number}
    assert apart == {"update_actor": pytest.approx(2 * 1e6 * SEQUENCES * LENGTH)}


def test_a_dense_model_has_no_rows_and_the_runs_of_mixtures_do_not_change_it(tmp_path: Path) -> None:
    found = plan(tmp_path)
    # Of 7 billion parameters: more than the smallest runs, whose pushes have the least seconds.
    work = replace(work_of(found), weight_bytes=14e9)
    assert not work.has_experts
    assert not work.is_reloaded
    dense = [run for run in timed_runs() if not run.workload.has_experts]
    assert len(dense) < len(timed_runs())
    with_mixtures = seconds_of(found.spec, work, H200, timed_runs()).phases
    without = seconds_of(found.spec, work, H200, dense).phases
    assert {phase: with_mixtures[phase] for phase in [*work.operations, "update_weights"]} == {
        phase: without[phase] for phase in [*work.operations, "update_weights"]
    }


def test_experts_take_what_remained_of_the_measured_mixture(tmp_path: Path) -> None:
    """Two seconds for the operations; the mixture took five for a pass, and eleven for an update with three times as
    many rows."""
    found = mixture(tmp_path)
    work = work_of(found)
    dense = TimedRun(replace(work, expert_bytes={}), dict.fromkeys(work.operations, 2.0), H200)
    measured = {"old_log_prob": 5.0, "update_actor": 11.0}
    again = seconds_of(found.spec, work, H200, [dense, TimedRun(work, measured, H200)])
    assert again.phases == pytest.approx(
        {"old_log_prob": 5.0, "values": 5.0, "ref": 5.0, "update_critic": 11.0, "update_actor": 11.0}
    )
    # One rate for all phases: 3 + 8 seconds for 1 + 3 passes.
    other = {"old_log_prob": 5.0, "update_actor": 10.0}
    mean = seconds_of(found.spec, work, H200, [dense, TimedRun(work, other, H200)]).phases
    assert mean["old_log_prob"] == pytest.approx(2 + 11 / 4)
    assert mean["update_actor"] == pytest.approx(2 + 3 * 11 / 4)


def test_rows_of_experts_are_scaled_by_the_memory_of_the_gpu(tmp_path: Path) -> None:
    found = mixture(tmp_path)
    work = replace(work_of(found), operations={"ref": 1e-9}, gpus={"ref": 2})
    dense = TimedRun(replace(work, operations={"ref": 1.0}, expert_bytes={}), {"ref": 1.0}, H200)
    runs = [dense, TimedRun(work, {"ref": 3.0}, H200)]
    h200, h100 = (seconds_of(found.spec, work, GPUS[name], runs).phases["ref"] for name in ("H200", "H100"))
    fixed = seconds_of(found.spec, work, H200, [dense]).phases["ref"]
    assert h200 == pytest.approx(3.0)
    assert (h100 - fixed) / (h200 - fixed) == pytest.approx(4.8 / 3.35)


def test_engines_that_reload_have_their_own_seconds_for_each_byte(tmp_path: Path) -> None:
    found = mixture(tmp_path)
    work = work_of(found)
    assert work.is_reloaded
    size = work.weight_bytes
    copied = [
        TimedRun(
            replace(work, is_reloaded=False, weight_bytes=share * size, expert_bytes={}), {"update_weights": s}, H200
        )
        for share, s in ((1.0, 1.0), (3.0, 3.0))
    ]
    reloaded = TimedRun(replace(work, weight_bytes=2 * size), {"update_weights": 12.0}, H200)
    assert seconds_of(found.spec, work, H200, [*copied, reloaded]).phases["update_weights"] == pytest.approx(6.0)
    # Two pushes that reload show what does not depend on the bytes.
    few = TimedRun(replace(work, weight_bytes=size / 2), {"update_weights": 6.0}, H200)
    assert seconds_of(found.spec, work, H200, [*copied, reloaded, few]).phases["update_weights"] == pytest.approx(8.0)
    less = replace(work, weight_bytes=size / 4)
    assert seconds_of(found.spec, less, H200, [*copied, reloaded, few]).phases["update_weights"] == pytest.approx(6.0)
    # Without a run that reloads, those that copy.
    assert seconds_of(found.spec, work, H200, copied).phases["update_weights"] == pytest.approx(1.0)


def test_quantized_weights_are_reloaded(tmp_path: Path) -> None:
    spec = job(write_config(tmp_path), rollout={"quantization": "FP8"}, algorithm={"rolloutCorrection": {}})
    assert work_of(plan_job(spec, {"all": H200}, runner=stub)).is_reloaded
