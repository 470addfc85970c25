"""The decision of a reconcile: a state machine (`states`), its events and plans, and the policies behind them. Pure.

`loop.py` and the admission webhook call it. It does no input or output: no Kopf, no client, no clock, no state.
"""

from ppojob_operator.reconcile.acceptance import spec_problem, was_accepted
from ppojob_operator.reconcile.decide import decide
from ppojob_operator.reconcile.fetching import needs_fetch
from ppojob_operator.reconcile.objects import dashboard_target
from ppojob_operator.reconcile.states import is_finished
from ppojob_operator.reconcile.status import JobState, job_state, show_fault, show_refusal

__all__ = [
    "JobState",
    "dashboard_target",
    "decide",
    "is_finished",
    "job_state",
    "needs_fetch",
    "show_fault",
    "show_refusal",
    "spec_problem",
    "was_accepted",
]
