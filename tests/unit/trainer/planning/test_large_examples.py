"""The jobs of examples/13-large are planned as they are: they fit, on H200s."""

from pathlib import Path

import pytest

from ppojob_trainer.commands.manifest import load
from ppojob_trainer.planning import plan_job
from ppojob_trainer.planning.gpus import gpus_of_pools
from ppojob_trainer.planning.report import phases_beyond_limit

FOLDER = Path(__file__).parents[4] / "examples" / "13-large"
GPUS = {"7b-on-2": 2, "32b-on-8": 8, "70b-on-32": 32, "8b-128k-on-16": 16, "235b-on-64": 64, "671b-on-512": 512}
CLOSE = {"671b-on-512"}
"""They have room for what they need, but not for all that PyTorch's allocator may keep."""
# Many layers, or long sequences, and many micro-batches: 40 seconds to minutes.
ARE_LONG = {"32b-on-8", "70b-on-32", "8b-128k-on-16", "235b-on-64", "671b-on-512"}


def marks(name: str) -> list[pytest.MarkDecorator]:
    # A limit of the function would win over those of its parameters.
    if name not in ARE_LONG:
        return [pytest.mark.timeout(300)]
    return [pytest.mark.slow, pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in GPUS])
def test_the_layout_fits(name: str) -> None:
    file = FOLDER / f"{name}.yaml"
    spec = load(file).spec
    found = plan_job(spec, gpus_of_pools([pool.name for pool in spec.pools], ["H200"]))

    assert sum(pool.gpus for pool in spec.pools) == GPUS[name]
    assert [(pool.name, pool.changes) for pool in found.pools if not pool.fits] == []
    assert all(host.fits for host in found.hosts)
    assert found.fits
    assert found.is_close == (name in CLOSE)
    assert found.notes == []
    assert list(phases_beyond_limit(found)) == []
    # The file says whether it has run.
    assert "\n# Not run: planned by a test." in file.read_text(encoding="utf-8")


def test_every_job_of_the_folder_is_planned() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.yaml")) == sorted(GPUS)
