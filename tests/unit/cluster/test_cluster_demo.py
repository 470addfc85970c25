"""The demo's pure parts: what it shows of a job, what it applies, and which cluster it dares to touch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from rich.console import Console

from tools.cluster.demo import manifests, progress
from tools.cluster.demo.run import EXAMPLE
from tools.cluster.demo.target import choose
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout

JOB: dict[str, Any] = {
    "spec": {"trainer": {"totalSteps": 8}},
    "status": {
        "phase": "Running",
        "progress": {"step": 3, "totalSteps": 8, "etaSeconds": 260, "reward": "0.1875"},
        "pools": [{"name": "actor", "readyNodes": 1, "desiredNodes": 2}, {"name": "critic", "desiredNodes": 1}],
        "conditions": [{"type": "Complete", "status": "False"}, {"type": "Progressing", "status": "True"}],
    },
}
EVENTS: list[dict[str, Any]] = [
    {"reason": "Valid", "message": "the spec is valid", "lastTimestamp": "2026-01-01T00:00:05Z"},
    {"reason": "FirstStep", "note": "a step was made", "eventTime": "2026-01-01T00:00:09Z", "lastTimestamp": None},
]


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


def test_a_running_job_is_read_with_its_newest_event() -> None:
    found = progress.read(JOB, EVENTS)
    assert found.line() == (
        "Running      step 3/8  260 s left  reward 0.1875  actor 1/2, critic 0/1  FirstStep: a step was made"
    )
    assert found.finished == ""


def test_a_job_that_was_not_reconciled_yet_can_be_shown() -> None:
    found = progress.read({"spec": {"trainer": {"totalSteps": 8}}}, [])
    assert found.line() == "Pending      step 0/8  time left unknown  reward -  no pools yet  no event yet"


@pytest.mark.parametrize("name", ["Complete", "Failed"])
def test_a_finished_job_is_seen_by_its_condition(name: str) -> None:
    conditions = [{"type": name, "status": "True", "reason": "Why", "message": "because"}]
    job = {"spec": {}, "status": {"conditions": conditions, "lastFailure": {"message": "m", "logTail": "line 1"}}}
    assert progress.read(job, []).finished == name
    assert progress.failure(job) == ("Why: because\nm\nline 1" if name == "Failed" else "m\nline 1")


def test_the_table_of_a_terminal_shows_the_same() -> None:
    console = Console(width=200, record=True, force_terminal=False)
    with console.capture() as capture:
        console.print(progress.read(JOB, EVENTS).table(seconds=12.4))
    row = capture.get().splitlines()[3]
    cells = [cell.strip() for cell in row.strip("│").split("│")]
    assert cells[:5] == ["Running", "3/8", "37 %", "260 s", "0.1875"]
    assert cells[-1] == "12"


def test_only_the_image_of_the_example_is_replaced() -> None:
    text = EXAMPLE.read_text()
    before, after = yaml.safe_load(text), yaml.safe_load(manifests.with_image(text, "registry/x:1"))
    assert after["spec"]["image"] == "registry/x:1"
    after["spec"]["image"] = before["spec"]["image"]
    assert after == before


def test_an_example_without_an_image_line_is_refused() -> None:
    with pytest.raises(ClusterError, match="has 0 lines `  image: "):
        manifests.with_image("spec: {image: x}", "y")


def test_the_demo_prepares_the_model_that_the_example_trains() -> None:
    spec = yaml.safe_load(EXAMPLE.read_text())["spec"]
    assert spec["model"]["actor"]["path"] == manifests.MODEL_PATH
    assert spec["storage"] == {"claimName": manifests.CLAIM, "mountPath": manifests.MOUNT_PATH}


def test_the_demo_s_pods_satisfy_the_restricted_standard() -> None:
    for pod in (manifests.storage_pod("x")["spec"], manifests.model_job("x")["spec"]["template"]["spec"]):
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert [container["securityContext"] for container in pod["containers"]] == [
            {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
        ]


def test_a_kubeconfig_that_happens_to_be_set_is_left_alone(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/etc/production.kubeconfig")
    target = choose(layout, trainer_image="", operator_image="")
    assert target.is_ours
    assert target.kubeconfig == str(layout.kubeconfig)


def test_with_both_images_the_users_cluster_is_taken(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", "/etc/production.kubeconfig")
    target = choose(layout, trainer_image="r/t:1", operator_image="r/o:1")
    assert not target.is_ours
    assert target.kubeconfig == "/etc/production.kubeconfig"


@pytest.mark.parametrize(("trainer", "operator"), [("r/t:1", ""), ("", "r/o:1")])
def test_one_image_alone_is_refused(layout: Layout, trainer: str, operator: str) -> None:
    with pytest.raises(ClusterError, match="go together"):
        choose(layout, trainer_image=trainer, operator_image=operator)


def test_images_without_a_cluster_of_the_users_are_refused(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECONFIG", str(layout.kubeconfig))
    with pytest.raises(ClusterError, match="set KUBECONFIG"):
        choose(layout, trainer_image="r/t:1", operator_image="r/o:1")
