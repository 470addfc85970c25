"""The plan of a reference or a reward model in several pools: each pool has a copy, and they share the work."""

from pathlib import Path

import pytest

from ppojob_trainer.planning import plan_job
from ppojob_trainer.planning.gpus import gpus_of_pools
from ppojob_trainer.planning.plan import Plan
from ppojob_trainer.planning.traffic import _share
from ppojob_trainer.planning.workload import workload_of
from tests.unit.trainer.planning.jobs import job, write_config
from tests.unit.trainer.planning.stubs import MB, stub


def test_a_reference_in_two_pools_is_planned_in_both_and_they_share_its_seconds(tmp_path: Path) -> None:
    pools = [{"name": "a", "gpusPerNode": 1}, {"name": "c", "gpusPerNode": 1}]

    def planned(ref: list[str]) -> Plan:
        placement = {"actor": "a", "critic": "c", "ref": ref, "reward": ["c"]}
        spec = job(write_config(tmp_path), pools=pools, placement=placement)
        return plan_job(spec, gpus_of_pools(["a", "c"], ["H200"]), runner=stub)

    both, one = planned(["a", "c"]), planned(["c"])

    names = {pool.name: [role.role.name for role in pool.roles] for pool in both.pools}
    assert names == {"a": ["actor", "ref"], "c": ["critic", "ref_c"]}
    assert both.pools[0].memory.training - one.pools[0].memory.training == 9 * MB
    assert both.pools[1].memory.training == one.pools[1].memory.training
    works = [
        workload_of(
            found.spec,
            {name: role.role for name, role in found.roles.items()},
            {name: role.measured for name, role in found.roles.items()},
        )
        for found in (both, one)
    ]
    assert works[0].operations["ref"] == works[1].operations["ref"] > 0
    assert [work.gpus["ref"] for work in works] == [2, 1]


def test_a_reward_model_in_two_pools_is_planned_in_both(tmp_path: Path) -> None:
    pools = [{"name": "a", "gpusPerNode": 2}, {"name": "c", "gpusPerNode": 1}]
    model = {"actor": {"path": write_config(tmp_path)}, "reward": {"path": write_config(tmp_path / "reward")}}

    def planned(reward: list[str]) -> Plan:
        placement = {"actor": "a", "critic": "c", "ref": ["c"], "reward": reward}
        spec = job(model["actor"]["path"], pools=pools, placement=placement, model=model, reward={"type": "Both"})
        return plan_job(spec, gpus_of_pools(["a", "c"], ["H200"]), runner=stub)

    both, one = planned(["c", "a"]), planned(["c"])

    names = {pool.name: [role.role.name for role in pool.roles] for pool in both.pools}
    assert names == {"a": ["actor", "reward_model"], "c": ["critic", "ref", "reward_model_c"]}
    assert both.pools[0].memory.training - one.pools[0].memory.training == 12 * MB
    assert both.pools[1].memory.training == one.pools[1].memory.training
    shares = {name: _share(both.spec, both.roles[name].role) for name in ("reward_model", "reward_model_c")}
    assert shares == {"reward_model": pytest.approx(2 / 3), "reward_model_c": pytest.approx(1 / 3)}
