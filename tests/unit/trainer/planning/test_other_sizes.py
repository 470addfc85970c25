"""Plans of a job with other sizes of its pools."""

from pathlib import Path

from ppojob_trainer.planning.layouts import plan_other_sizes
from ppojob_trainer.planning.measured_once import measured_once
from ppojob_trainer.planning.work import Measured, Work
from tests.unit.trainer.planning.jobs import job, write_config
from tests.unit.trainer.planning.stubs import H200, stub


def test_other_sizes_are_planned_and_each_role_is_measured_once_for_each_size(tmp_path: Path) -> None:
    pools = [{"name": "a", "gpusPerNode": 2}, {"name": "c", "gpusPerNode": 2}]
    placement = {"actor": "a", "critic": "c", "ref": ["c"], "reward": ["c"]}
    spec = job(write_config(tmp_path), pools=pools, placement=placement)
    measured: list[tuple[str, int]] = []

    def counted(work: Work) -> Measured:
        measured.append((work.kind, work.dims.world_size))
        return stub(work)

    plans = list(plan_other_sizes(spec, {"a": H200, "c": H200}, runner=measured_once(counted)))
    sizes = [tuple(pool.gpus for pool in one.spec.pools) for one in plans]
    assert sizes[0] in {(1, 2), (2, 1)}
    assert {(1, 2), (2, 1), (1, 3), (3, 1)} <= set(sizes)
    assert all(one.fits for one in plans)
    assert sorted(set(measured)) == sorted(measured)
