"""`make test`: the targets of the Makefile that are its parts, two at a time.

    cluster-up ─▶ images ─▶ integration ─▶ e2e
    lint, contracts, generate-check, golden, architecture, trainer, types, unit, oracles, unit-slow: in any order

Whole jobs on Ray (trainer) and on the cluster (e2e) each take up to 16 GiB of memory, so one waits for the other;
meanwhile, small parts run. The cluster's parts come first, because they wait more than they compute, and e2e, which is
the longest way to the end, must begin early. A cluster or an image that cannot be made ends the run at once. A cluster
that ran before stays; one that this started is taken down.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.cluster import is_healthy
from tools.cluster.layout import PROJECT, Layout
from tools.suite.parts import PASSED, Part, Suite


@dataclass(frozen=True)
class Target(Part):
    """A target of the Makefile.

    `after`: the part that must have ended before; "": none. `is_large`: it takes most of the machine's memory, so it
    never runs beside another large part.
    """

    after: str = ""
    is_large: bool = False

    @property
    def command(self) -> Sequence[str]:
        return ("make", "--no-print-directory", self.name)

    @property
    def title(self) -> str:
        return f"make {self.name}"


PARTS: Sequence[Target] = (
    Target("cluster-up", 4800, is_foundation=True),
    Target("images", 3600, after="cluster-up", is_foundation=True),
    Target("integration", 3600, after="images"),
    Target("e2e", 5400, after="integration", is_large=True),
    Target("lint", 900),
    Target("contracts", 900),
    Target("generate-check", 900),
    Target("golden", 900),
    Target("architecture", 600),
    Target("trainer", 4800, is_large=True),
    Target("types", 1200),
    Target("unit", 3600),
    Target("oracles", 1800),
    Target("unit-slow", 3600),
)
AT_A_TIME = 2
CLUSTER_DOWN = Target("cluster-down", 900, is_foundation=True)
# In the project.
LOGS = Path(".build") / "test"


def run(layout: Layout, project: Path = PROJECT, parts: Sequence[Target] = PARTS) -> int:
    """Run everything; return 0 if all parts passed, else 1."""
    suite = _Targets(project, list(parts), LOGS)
    was_healthy = is_healthy(layout)
    try:
        suite.run_all()
    finally:
        if not was_healthy:
            suite.stop.clear()
            suite.run_part(CLUSTER_DOWN)
        suite.print_table()
    results = [result for result in suite.results if result.name != CLUSTER_DOWN.name]
    return 0 if len(results) == len(parts) and all(result.result == PASSED for result in suite.results) else 1


class _Targets(Suite[Target]):
    @property
    def at_a_time(self) -> int:
        return AT_A_TIME

    def may_run(self, part: Target) -> bool:
        not_ended = {other.name for other in (*self.waiting, *self.running)}
        return part.after not in not_ended and not (part.is_large and any(other.is_large for other in self.running))
