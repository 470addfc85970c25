"""The policies of a reconcile, one per file, which `decide` combines. Pure.

`loop.py` and `admission` call them. They do no input or output: no Kopf, no client, no clock, no state.
"""

from ppojob_operator.reconcile.acceptance import spec_problem, was_accepted
from ppojob_operator.reconcile.completion import is_finished
from ppojob_operator.reconcile.decide import decide
from ppojob_operator.reconcile.faults import show_fault
from ppojob_operator.reconcile.fetching import needs_fetch
from ppojob_operator.reconcile.job_state import JobState, job_state
from ppojob_operator.reconcile.ray_dashboard import dashboard_target
from ppojob_operator.reconcile.reading import (
    is_accepted,
    is_fetch_pod,
    read_claim,
    read_cluster,
    read_fetch_job,
    read_fetch_pod,
    read_job,
    read_pod,
    read_workload,
)

__all__ = [
    "JobState",
    "dashboard_target",
    "decide",
    "is_accepted",
    "is_fetch_pod",
    "is_finished",
    "job_state",
    "needs_fetch",
    "read_claim",
    "read_cluster",
    "read_fetch_job",
    "read_fetch_pod",
    "read_job",
    "read_pod",
    "read_workload",
    "show_fault",
    "spec_problem",
    "was_accepted",
]
