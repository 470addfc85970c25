"""Plans whose roles need memory that was made up, so that sums can be computed by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from ppojob_trainer.planning import Plan, plan_job
from ppojob_trainer.planning.gpus import GPUS, Gpu
from ppojob_trainer.planning.roles import PlannedRole
from ppojob_trainer.planning.work import Measured, Work
from ppojob_trainer.planning.workload import Workload, workload_of
from tests.unit.trainer.planning.jobs import job, write_config

MB = 10**6
H200 = GPUS["H200"]
OF_ROLE = {
    "actor": Measured(100, weights=10 * MB, gradients=10 * MB, optimizer=20 * MB, forward=15 * MB, update=70 * MB),
    "critic": Measured(100, weights=11 * MB, gradients=11 * MB, optimizer=22 * MB, forward=16 * MB, update=80 * MB),
    "ref": Measured(100, weights=5 * MB, forward=9 * MB),
    "reward_model": Measured(100, weights=6 * MB, forward=12 * MB),
}


def stub(work: Work) -> Measured:
    """Return the made-up memory of a role."""
    return OF_ROLE[work.kind]


def plan(folder: Path, gpu: Gpu = H200, **sections: Any) -> Plan:
    """Return the plan of the small job with these sections."""
    spec = job(write_config(folder), **sections)
    return plan_job(spec, {pool.name: gpu for pool in spec.pools}, runner=stub)


def of_roles(found: Plan) -> tuple[dict[str, PlannedRole], dict[str, Measured]]:
    """Return the roles of a plan and what was measured of each, as links and seconds are computed from them."""
    return (
        {name: one.role for name, one in found.roles.items()},
        {name: one.measured for name, one in found.roles.items()},
    )


def work_of(found: Plan, **changes: Any) -> Workload:
    """Return the work of a plan's step; `changes`: of what was measured of each role."""
    roles, measured = of_roles(found)
    return workload_of(found.spec, roles, {name: replace(one, **changes) for name, one in measured.items()})
