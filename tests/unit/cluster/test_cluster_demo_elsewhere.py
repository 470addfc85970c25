"""The demo on a cluster of the user's: each thing that can be missing there is named, with what to do."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.cluster.demo import foreign, pods, storage
from tools.cluster.demo.target import Target
from tools.cluster.errors import ClusterError

VERSION = json.dumps({"serverVersion": {"gitVersion": "v1.34.4"}})
STANDARD = {"metadata": {"name": "standard", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}}
LOCAL: dict[str, Any] = {"metadata": {"name": "local"}}
ANSWERS = {
    "version": VERSION,
    "api-resources": "rayclusters.ray.io\nrayjobs.ray.io\n",
    "get persistentvolumeclaim": "",
    "get storageclasses": json.dumps({"items": [LOCAL, STANDARD]}),
}
BACK_OFF = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "r/t:1": not found'}


@dataclass(frozen=True)
class Scripted(Target):
    """Answers as a cluster would, by how kubectl's arguments begin; an exception is raised."""

    answers: dict[str, Any]

    def kubectl(self, *arguments: str, limit: float = 60, stdin: str | None = None) -> str:
        found = next(answer for begin, answer in self.answers.items() if " ".join(arguments).startswith(begin))
        if isinstance(found, Exception):
            raise found
        return str(found)


def cluster(**changes: Any) -> Target:
    answers = ANSWERS | {name.replace("_", " "): answer for name, answer in changes.items()}
    return Scripted("/etc/kubeconfig", "", is_ours=False, answers=answers)


@pytest.fixture(autouse=True)
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH that has kubectl and helm."""
    for name in ("kubectl", "helm"):
        (tmp_path / name).write_text("")
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return tmp_path


def test_a_cluster_with_all_that_is_needed_is_described() -> None:
    assert foreign.check(cluster()) == "Kubernetes v1.34.4, KubeRay, the default StorageClass standard"


def test_a_claim_that_is_there_needs_no_storage_class() -> None:
    there = cluster(get_persistentvolumeclaim="persistentvolumeclaim/ppojob-data\n", get_storageclasses='{"items": []}')

    assert foreign.check(there).endswith("the claim ppojob-demo/ppojob-data that is there")


@pytest.mark.parametrize("name", ["kubectl", "helm"])
def test_a_missing_program_is_named(programs: Path, name: str) -> None:
    (programs / name).unlink()

    with pytest.raises(ClusterError, match=rf"{name} is not on PATH: install it, or build it with"):
        foreign.check(cluster())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"version": ClusterError("exit code 1: connection refused")},
            r"the API server of KUBECONFIG=/etc/kubeconfig does not answer: .*refused\nSee that `kubectl get nodes`",
        ),
        ({"version": "{}"}, r"does not answer"),
        (
            {"api-resources": "rayjobs.ray.io\n"},
            r"KubeRay is not installed there .* install the chart kuberay",
        ),
        (
            {"get_storageclasses": json.dumps({"items": [LOCAL]})},
            r"no StorageClass is the default one \(there are: local\).* make the claim yourself",
        ),
        ({"get_storageclasses": '{"items": []}'}, r"there are: none"),
    ],
    ids=["no answer", "half an answer", "no KubeRay", "no default class", "no class"],
)
def test_missing_parts_are_named_with_the_remedy(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ClusterError, match=words):
        foreign.check(cluster(**changes))


def a_pod(*, waiting: dict[str, str] | None = None, message: str = "") -> dict[str, Any]:
    status: dict[str, Any] = {"phase": "Pending", "conditions": [{"status": "False", "message": message}]}
    if waiting:
        status["containerStatuses"] = [{"state": {"waiting": waiting}}]
    return {
        "metadata": {"name": "demo-storage"},
        "spec": {"nodeName": "n1", "containers": [{"image": "r/t:1"}]},
        "status": status,
    }


def test_an_image_that_cannot_be_pulled_ends_the_wait_at_once() -> None:
    with pytest.raises(ClusterError, match=r"n1 cannot pull the image r/t:1 .*not found.* name it in IMAGE;"):
        pods.require_image(a_pod(waiting=BACK_OFF), "IMAGE")


@pytest.mark.parametrize("reason", ["ContainerCreating", "ErrImagePull"])
def test_an_image_that_may_still_come_is_waited_for(reason: str) -> None:
    pods.require_image(a_pod(waiting={"reason": reason}), "IMAGE")


def test_a_pod_that_waits_is_reported_in_the_words_of_the_scheduler() -> None:
    said = pods.words(a_pod(message="0/3 nodes are available: 3 Insufficient memory."))

    assert said == "pod demo-storage is Pending: 0/3 nodes are available: 3 Insufficient memory."


def test_a_claim_without_a_volume_ends_the_wait_with_the_provisioners_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "CLAIM_LIMIT_SECONDS", 0.0)
    claim = {"metadata": {"uid": "u"}, "status": {"phase": "Pending"}}
    event = {"reason": "ProvisioningFailed", "message": "only ReadWriteOnce is supported"}
    target = cluster(
        delete="",
        apply="",
        get_pod=json.dumps(a_pod(message="pod has unbound PersistentVolumeClaims")),
        get_persistentvolumeclaim=json.dumps(claim),
        get_events=json.dumps({"items": [event]}),
    )

    with pytest.raises(ClusterError, match=r"is Pending \(ProvisioningFailed: only ReadWriteOnce .*\). Make a claim"):
        storage.open_storage(target, "r/t:1")
