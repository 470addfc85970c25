"""A plan that fits, but not with the plan's known error, is close: it says so, names changes, and is no failure."""

import io
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ppojob_trainer.main.memory_fit import KNOWN_ERROR, KNOWN_ERROR_OF_EXPERTS
from ppojob_trainer.planning import Plan, plan_job
from ppojob_trainer.planning.gpus import Gpu
from ppojob_trainer.planning.pool import PoolPlan
from ppojob_trainer.planning.report import as_json, as_text
from ppojob_trainer.planning.work import Measured, Work
from tests.unit.trainer.planning.jobs import job, write_config, write_experts
from tests.unit.trainer.planning.stubs import H200, plan, stub

AWAKE = {"sleep": False, "gpuMemoryUtilization": 0.25}


def of_memory(size: float) -> Gpu:
    return replace(H200, memory=size)


def close_gpu(folder: Path, share: float, **sections: Any) -> Gpu:
    """Return a GPU of which the plan takes this share."""
    (pool,) = plan(folder, of_memory(20e9), **sections).pools
    without = pool.total - (0.0 if pool.engine is None else pool.engine.share)
    utilization = 0.0 if pool.engine is None else pool.engine.share / 20e9
    return of_memory(without / (share - utilization))


def words(found: Plan) -> str:
    printed = io.StringIO()
    Console(file=printed, width=300).print(as_text(found))
    return printed.getvalue()


@pytest.mark.parametrize(
    ("share", "verdict"),
    [(0.5, "fits"), (0.86, "fits"), (0.88, "close"), (0.999, "close"), (1.01, "does not fit")],
)
def test_the_verdict_by_the_share_of_the_gpu(tmp_path: Path, share: float, verdict: str) -> None:
    found = plan(tmp_path, close_gpu(tmp_path, share, rollout=AWAKE), rollout=AWAKE)
    (pool,) = found.pools
    assert pool.total / pool.gpu.memory == pytest.approx(share)
    assert (pool.verdict, found.verdict) == (verdict, verdict)
    assert found.fits == (verdict != "does not fit")
    assert found.is_close == (verdict == "close")
    assert bool(pool.changes) == (verdict != "fits")


def test_a_close_plan_says_how_much_more_was_needed_and_what_to_change(tmp_path: Path) -> None:
    found = plan(tmp_path, close_gpu(tmp_path, 0.99, rollout=AWAKE), rollout=AWAKE)
    printed = words(found)
    assert printed.startswith("The job is close. Pool all is planned at ")
    assert "GB, and measured pools used up to 15% more than planned: it may run out of memory without" in printed
    assert "GB: close" in printed
    assert "fits" not in printed.split("host memory")[0]
    assert "  change rollout.sleep: true (frees " in printed
    assert "  change actor.maxTokensPerGPU: 512 (now 1024)" in printed
    content = json.loads(as_json(found))
    (pool,) = content["pools"]
    assert (content["fits"], content["isClose"], pool["fits"], pool["isClose"]) == (True, True, True, True)
    assert pool["changes"]


def test_a_pool_with_experts_needs_more_room(tmp_path: Path) -> None:
    gpu = close_gpu(tmp_path, 0.86, rollout=AWAKE)
    spec = job(write_experts(tmp_path), rollout=AWAKE)

    def with_experts(work: Work) -> Measured:
        return replace(stub(work), expert_layers=2)

    (dense,) = plan_job(spec, {"all": gpu}, runner=stub).pools
    found = plan_job(spec, {"all": gpu}, runner=with_experts)
    (pool,) = found.pools
    assert (dense.verdict, pool.verdict) == ("fits", "close")
    assert pool.total * (1 + KNOWN_ERROR) < gpu.memory < pool.total * (1 + KNOWN_ERROR_OF_EXPERTS)
    assert "measured pools used up to 25% more than planned" in words(found)


def test_a_plan_with_room_is_not_close(tmp_path: Path) -> None:
    found = plan(tmp_path)
    assert words(found).startswith("The job fits.")
    assert json.loads(as_json(found))["isClose"] is False


def test_engines_that_stay_loaded_may_have_a_smaller_share(tmp_path: Path) -> None:
    """Most memory is in use while roles compute, beside the engine. With the suggested share, the plan is not close."""

    def with_passes(work: Work) -> Measured:
        return replace(stub(work), update=3 * 10**9, forward=3 * 10**9)

    def pool_of(rollout: dict[str, Any]) -> PoolPlan:
        model = {"actor": {"path": write_config(tmp_path), "offload": {"parameters": True, "optimizer": True}}}
        spec = job(write_config(tmp_path), model=model, rollout=rollout)
        (found,) = plan_job(spec, {"all": gpu}, runner=with_passes).pools
        return found

    # Three roles of 3 GB, four processes of 2.25 GB, and a quarter of the GPU.
    gpu = of_memory(18e9 / (0.99 - 0.25))
    pool = pool_of(AWAKE)
    assert pool.verdict == "close"
    assert pool.memory.generation + pool.memory.processes < pool.most_planned
    (change,) = [one for one in pool.changes if one.startswith("rollout.gpuMemoryUtilization")]
    again = pool_of({**AWAKE, "gpuMemoryUtilization": float(change.split()[1])})
    assert again.verdict == "fits"
    assert again.total * (1 + KNOWN_ERROR) <= gpu.memory


def test_a_change_of_two_roles_is_named_once(tmp_path: Path) -> None:
    model = {"actor": {"path": write_config(tmp_path)}}
    (pool,) = plan(tmp_path, close_gpu(tmp_path, 0.99, rollout=AWAKE), model=model, rollout=AWAKE).pools
    assert {"actor", "ref"} <= {found.role.name for found in pool.roles}
    assert len([one for one in pool.changes if one.startswith("actor.maxTokensPerGPU")]) == 1
