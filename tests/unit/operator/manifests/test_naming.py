"""Names fit where Kubernetes and KubeRay put them."""

import re

from ppojob_operator.manifests import naming
from ppojob_operator.plan import JobKey

LONGEST, SECRET = "a" * 40, b"k" * 32


def test_a_cluster_name_fits_kuberay_and_dns() -> None:
    name = naming.cluster_name(LONGEST, "uid", 3, SECRET)

    assert len(name) <= 53
    assert re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name)


def test_a_cluster_name_is_the_same_each_time_and_another_for_another_object_or_attempt() -> None:
    names = {naming.cluster_name("job", uid, attempt, SECRET) for uid in ("a", "b") for attempt in (0, 1, 0)}

    assert len(names) == 4


def test_without_the_operators_key_the_name_of_a_cluster_and_of_its_secret_cannot_be_guessed() -> None:
    name, other = (naming.cluster_name("job", "uid", 0, key) for key in (SECRET, b"o" * 32))

    assert name != other
    assert re.fullmatch(r"job-[0-9a-f]{10}", name), "forty bits: more names than anybody can take"


def test_other_names_fit_a_label() -> None:
    names = [
        naming.service_account_name(LONGEST),
        naming.config_map_name(LONGEST),
        naming.dashboard_secret_name(naming.cluster_name(LONGEST, "uid", 0, SECRET)),
    ]

    assert all(len(name) <= 63 for name in names)


def test_a_submission_id_distinguishes_object_and_attempt() -> None:
    assert naming.submission_id("u", 2) == "ppojob-u-2"


def test_everything_belongs_to_its_job() -> None:
    metadata = naming.metadata("x", JobKey("ns", "job"), "uid")

    assert metadata["labels"] == {"ppojob.dev/job": "job", "app.kubernetes.io/managed-by": "ppojob-operator"}
    assert metadata["ownerReferences"] == [
        {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "name": "job", "uid": "uid", "controller": True}
    ]
