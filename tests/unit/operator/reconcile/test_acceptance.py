"""A job is accepted, or its condition says why not, before any of its objects is created."""

import pytest

from ppojob_api.v1alpha1.constants import Condition, Phase, Reason
from ppojob_operator.plan import Claim
from tests.unit.operator.reconcile.worlds import World, spec


def test_a_good_job_is_accepted_and_its_clock_starts() -> None:
    world = World()

    world.look()

    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)
    assert world.status["startTime"] == "2026-03-01T12:00:00Z"
    assert world.status["observedGeneration"] == 1


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"placement": {"actor": "nowhere"}}, "spec.placement.actor: 'nowhere': there is no pool of this name"),
        ({"actor": {"miniBatchSize": 7}}, "spec.actor.miniBatchSize: 7: does not divide data.trainBatchSize (16)"),
        ({"learningRate": 1}, "spec.learningRate: 1: there is no such field"),
        ({"env": [{"name": "RAY_ADDRESS", "value": "x"}]}, "spec.env[0].name: 'RAY_ADDRESS': this variable is set by"),
        (
            {"pools": [{**pool, "podTemplate": {"spec": {"hostNetwork": True}}} for pool in spec()["pools"]]},
            "spec.pools[0].podTemplate.spec.hostNetwork: True: use network.hostNetwork of the pool",
        ),
    ],
)
def test_a_bad_spec_is_refused_with_path_value_and_remedy(changes: dict[str, object], words: str) -> None:
    world = World(**changes)

    plan = world.look()

    assert world.verdict(Condition.ACCEPTED) == ("False", Reason.INVALID_SPEC)
    assert words in world.condition(Condition.ACCEPTED).message
    assert world.status["phase"] == Phase.PENDING
    assert plan.apply == ()
    assert world.said == [Reason.INVALID_SPEC]


def test_a_refused_job_is_accepted_once_it_is_fixed() -> None:
    world = World(actor={"miniBatchSize": 7})
    world.settle()

    world.spec, world.generation = spec(), 2
    world.look()

    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)
    assert world.condition(Condition.ACCEPTED).observed_generation == 2


def test_without_kuberay_the_job_waits_and_continues_when_it_is_installed() -> None:
    world = World().see(is_kuberay_served=False)

    world.settle()
    assert world.verdict(Condition.ACCEPTED) == ("Unknown", Reason.KUBERAY_MISSING)
    assert world.plan().requeue_after is not None

    world.see(is_kuberay_served=True).look()
    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


@pytest.mark.parametrize(
    ("claim", "words"),
    [
        (None, "spec.storage.claimName: 'data': there is no such claim in namespace rl-team"),
        (Claim("data", "Lost"), "the claim has lost its volume"),
    ],
)
def test_without_its_claim_the_job_waits_and_names_it(claim: Claim | None, words: str) -> None:
    world = World().see(claim=claim)

    world.settle()
    assert world.verdict(Condition.ACCEPTED) == ("False", Reason.STORAGE_MISSING)
    assert words in world.condition(Condition.ACCEPTED).message
    assert "startTime" not in world.status

    world.see(claim=Claim("data", "Bound")).look()
    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


def test_a_claim_that_waits_for_its_first_pod_is_good_enough() -> None:
    world = World().see(claim=Claim("data", "Pending"))

    world.look()

    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


def test_a_claim_that_not_all_pods_can_write_to_is_refused_and_the_job_continues_with_a_better_one() -> None:
    world = World().see(claim=Claim("data", "Bound", ("ReadWriteOncePod",)))

    world.settle()
    assert world.verdict(Condition.ACCEPTED) == ("False", Reason.STORAGE_UNFIT)
    assert world.said == [Reason.STORAGE_UNFIT]
    assert "startTime" not in world.status

    world.see(claim=Claim("data", "Bound", ("ReadWriteMany",))).look()
    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


def test_warnings_are_given_at_the_admission_and_stay_until_the_spec_changes() -> None:
    world = World(checkpoint={"everySteps": 0}).see(claim=Claim("data", "Bound", ("ReadWriteOnce",)))

    world.run()
    said = world.condition(Condition.ACCEPTED).message
    world.edit(checkpoint={"everySteps": 5}).settle()
    corrected = world.condition(Condition.ACCEPTED).message

    assert "; warnings: spec.checkpoint.everySteps: 0: no checkpoint is saved before the end" in said
    assert "; spec.storage.claimName: 'data': the claim is ReadWriteOnce: unless all 3 pods are on" in said
    assert said in world.words
    assert corrected == "the spec is valid and its claim exists; the trainer checks the paths when it starts"


def test_the_claim_is_not_asked_for_again_once_the_job_was_admitted() -> None:
    world = World().run()

    world.see(claim=None).settle()

    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


def test_a_running_job_whose_spec_is_no_longer_understood_fails_and_gives_its_pods_back() -> None:
    world = World().run()

    world.spec, world.generation = spec(actor={"miniBatchSize": 7}), 2
    world.settle()

    assert world.verdict(Condition.FAILED) == ("True", Reason.INVALID_SPEC)
    assert world.observed.clusters == ()


def test_a_job_that_is_being_deleted_is_left_alone() -> None:
    world = World().run()
    world.is_deleting = True

    plan = world.wait(9999).look()

    assert plan.status is None
    assert plan.apply == ()
    assert plan.delete_clusters == ()


def test_a_job_that_began_under_a_newer_operator_is_neither_failed_nor_touched() -> None:
    world = World().run()
    cluster = world.cluster_name
    world.spec, world.generation = {**world.spec, "optimizer": {"name": "new"}}, 2

    plan = world.wait(1).look()

    assert world.verdict(Condition.ACCEPTED) == ("Unknown", Reason.OPERATOR_TOO_OLD)
    assert "does not know spec.optimizer: upgrade the operator" in world.condition(Condition.ACCEPTED).message
    assert (plan.apply, plan.delete_clusters, world.cluster_name) == ((), (), cluster)
    assert world.status["phase"] == Phase.RUNNING
    assert world.wait(1).look().status is None

    world.spec, world.generation = {name: value for name, value in world.spec.items() if name != "optimizer"}, 3
    world.wait(1).look()
    assert world.verdict(Condition.ACCEPTED) == ("True", Reason.VALID)


def test_a_job_that_an_earlier_version_accepted_runs_on_with_a_micro_batch_below_its_longest_sequence() -> None:
    world = World().run()
    data = {**world.spec["data"], "maxResponseLength": 32_768}

    # Nothing in the cluster refused it then.
    world.spec = {**world.spec, "data": data}
    world.settle()
    assert (world.status["phase"], world.verdict(Condition.ACCEPTED)[0]) == (Phase.RUNNING, "True")
    world.edit(runPolicy={"suspend": True}).settle()
    assert world.verdict(Condition.ACCEPTED)[0] == "True"
    assert Reason.INVALID_SPEC not in world.said

    new = World(data=data)
    new.look()
    assert new.verdict(Condition.ACCEPTED) == ("False", Reason.INVALID_SPEC)
    assert "spec.actor.maxTokensPerGPU: 16384: is less than the longest" in new.condition(Condition.ACCEPTED).message
