"""Whatever a spec contains, one reconcile ends without an exception: with a refusal, or with objects to apply.

The schema and the rules of the API server are not asked first, so more comes in than in a cluster. PPOJOB_FUZZ is the
number of specs (`make fuzz`).
"""

import json
import os
from typing import Any

from hypothesis import HealthCheck, given, settings

from ppojob_api.v1alpha1.constants import Condition
from ppojob_operator.plan import Claim, Observed
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import decide
from tests.fuzz.specs import specs
from tests.unit.operator.reconcile.worlds import KEY, START, SURROUNDINGS, UID

IS_LONG = "PPOJOB_FUZZ" in os.environ
NUM_SPECS = int(os.environ.get("PPOJOB_FUZZ", "1000"))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def raw_job(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": KEY.name, "namespace": KEY.namespace, "uid": UID, "generation": 1}
    return {"metadata": metadata, "spec": spec}


@settings(
    max_examples=NUM_SPECS,
    deadline=None,
    # `make test` tries the same specs each time.
    derandomize=not IS_LONG,
    suppress_health_check=SLOW,
    print_blob=True,
)
@given(specs())
def test_every_spec_is_refused_or_rendered(spec: dict[str, Any]) -> None:
    job = read_job(raw_job(spec))
    name = spec["storage"].get("claimName") if isinstance(spec.get("storage"), dict) else None
    claim = Claim(name, "Bound", ("ReadWriteMany",)) if isinstance(name, str) else None

    plan = decide(job, Observed(SURROUNDINGS, claim=claim), START)

    assert plan.status is not None
    conditions = {each["type"]: each for each in plan.status["conditions"]}
    accepted = conditions[Condition.ACCEPTED]
    assert accepted["message"]
    assert plan.status["phase"]
    if accepted["status"] == "True":
        assert plan.apply or conditions[Condition.SUSPENDED]["status"] == "True"
        json.dumps(plan.apply, allow_nan=False)
    else:
        assert plan.apply == ()
