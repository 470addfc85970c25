"""Whatever a spec contains, one reconcile ends without an exception: with a refusal, or with objects to apply.

The schema and the rules of the API server are not asked first, so more comes in than in a cluster. PPOJOB_FUZZ is the
number of specs (`make fuzz`).
"""

import json
import os
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from ppojob_api.v1alpha1.constants import Condition
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_operator.manifests.pod import head_template, pool_template
from ppojob_operator.manifests.ray_cluster import ray_cluster
from ppojob_operator.plan import Claim, Job, Observed
from ppojob_operator.reading import read_job
from ppojob_operator.reconcile import decide
from ppojob_operator.reconcile.acceptance import spec_problem
from tests.fuzz.finds import FINDS, Find
from tests.fuzz.specs import FRAGMENTS, examples, put, specs
from tests.unit.operator.reconcile.worlds import KEY, START, SURROUNDINGS, UID

IS_LONG = "PPOJOB_FUZZ" in os.environ
NUM_SPECS = int(os.environ.get("PPOJOB_FUZZ", "1000"))
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large]


def raw_job(spec: dict[str, Any]) -> dict[str, Any]:
    metadata = {"name": KEY.name, "namespace": KEY.namespace, "uid": UID, "generation": 1}
    return {"metadata": metadata, "spec": spec}


def assert_pods_have_what_the_trainer_needs(job: Job) -> None:
    """Fail if a user's pod template has removed what the operator and the trainer need."""
    assert isinstance(job.spec, PPOJobSpec)
    spec = resolve(job.spec)
    cluster = ray_cluster(spec, job.key, job.uid, "cluster")["spec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    ours = [head_template(spec, job.key, job.uid)]
    ours += [pool_template(spec, pool, job.key, "cluster") for pool in spec.pools]
    for own, group in zip(ours, groups, strict=True):
        template = group["template"]
        assert own["metadata"]["labels"].items() <= template["metadata"]["labels"].items()
        assert all(volume in template["spec"]["volumes"] for volume in own["spec"]["volumes"])
        needed, found = own["spec"]["containers"][0], template["spec"]["containers"][0]
        assert found["name"] == needed["name"]
        assert found["lifecycle"]["preStop"] == needed["lifecycle"]["preStop"]
        assert all(mount in found["volumeMounts"] for mount in needed["volumeMounts"])
        assert {variable["name"] for variable in needed["env"]} <= {variable["name"] for variable in found["env"]}
        assert found["image"]


@pytest.mark.parametrize("place", ["head", "pool"])
def test_every_fragment_of_a_pod_template_is_refused_or_keeps_what_the_trainer_needs(place: str) -> None:
    num_accepted = 0
    for path, value in [(path, value) for path, values in FRAGMENTS.items() for value in values]:
        spec: dict[str, Any] = examples()[0]
        target = spec.setdefault("head", {}) if place == "head" else spec["pools"][0]
        put(target, ("podTemplate", *path), value)
        job = read_job(raw_job(spec))
        if (problem := spec_problem(job)) is None:
            assert_pods_have_what_the_trainer_needs(job)
            num_accepted += 1
        else:
            where = "spec.head." if place == "head" else "spec.pools[0]."
            assert all(error.path.startswith(where) for error in problem.errors), (path, value, problem)
    assert num_accepted > 20


@pytest.mark.parametrize("find", FINDS, ids=lambda find: find.name)
def test_what_the_fuzz_has_found_is_refused_by_its_field_or_rendered(find: Find) -> None:
    accepted = assert_refused_or_rendered(find.spec())

    if find.refused:
        assert accepted["status"] == "False"
        assert accepted["message"].startswith(f"spec.{find.refused}"), accepted["message"]
    else:
        assert accepted["status"] == "True", accepted["message"]


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
    assert_refused_or_rendered(spec)


def assert_refused_or_rendered(spec: dict[str, Any]) -> dict[str, Any]:
    """Reconcile a job with a spec once; return its condition Accepted."""
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
        assert_pods_have_what_the_trainer_needs(job)
        assert plan.apply or conditions[Condition.SUSPENDED]["status"] == "True"
        json.dumps(plan.apply, allow_nan=False)
    else:
        assert plan.apply == ()
    return accepted
