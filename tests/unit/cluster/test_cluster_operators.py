"""Operators that watch all namespaces are paused as long as any test needs it, and no longer."""

from __future__ import annotations

import json
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tools.cluster.layout import Layout
from tools.cluster.operators import paused


@dataclass
class Deployments:
    """A cluster with Deployments of ours: one watches all namespaces, one only two."""

    items: dict[str, dict[str, Any]]

    @classmethod
    def made(cls) -> Deployments:
        return cls({"demo": deployment("demo", "", 2), "other": deployment("other", "team-a,team-b", 1)})

    def kubectl(self, *arguments: str) -> str:
        match arguments:
            case ("get", "deployments", *_):
                return json.dumps({"items": list(self.items.values())})
            case ("scale", target, _, replicas):
                self.items[target.removeprefix("deployment/")]["spec"]["replicas"] = int(replicas.partition("=")[2])
            case ("annotate", target, *_, annotation):
                self.annotate(self.items[target.removeprefix("deployment/")]["metadata"]["annotations"], annotation)
        return ""

    @staticmethod
    def annotate(annotations: dict[str, str], annotation: str) -> None:
        name, is_set, value = annotation.partition("=")
        if is_set:
            annotations[name] = value
        else:
            del annotations[name.removesuffix("-")]

    def replicas(self) -> dict[str, int]:
        return {name: item["spec"]["replicas"] for name, item in self.items.items()}


def deployment(name: str, watched: str, replicas: int) -> dict[str, Any]:
    container = {"env": [{"name": "PPOJOB_WATCH_NAMESPACES", "value": watched}]}
    return {
        "metadata": {"name": name, "namespace": name, "annotations": {}},
        "spec": {"replicas": replicas, "template": {"spec": {"containers": [container]}}},
    }


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


def test_only_those_that_watch_all_namespaces_are_paused(layout: Layout) -> None:
    cluster = Deployments.made()
    with paused(cluster.kubectl, layout=layout):
        assert cluster.replicas() == {"demo": 0, "other": 1}
    assert cluster.items == Deployments.made().items


def test_the_last_one_scales_them_back(layout: Layout) -> None:
    cluster = Deployments.made()
    with ExitStack() as second:
        with paused(cluster.kubectl, layout=layout):
            second.enter_context(paused(cluster.kubectl, layout=layout))
        assert cluster.replicas() == {"demo": 0, "other": 1}
    assert cluster.items == Deployments.made().items


def test_what_a_killed_test_left_paused_is_scaled_back_by_the_next(layout: Layout) -> None:
    cluster = Deployments.made()
    cluster.items["demo"]["spec"]["replicas"] = 0
    cluster.items["demo"]["metadata"]["annotations"]["ppojob.dev/replicas-before-tests"] = "2"
    with paused(cluster.kubectl, layout=layout):
        assert cluster.replicas() == {"demo": 0, "other": 1}
    assert cluster.items == Deployments.made().items


def test_a_failing_test_scales_them_back(layout: Layout) -> None:
    cluster = Deployments.made()
    with pytest.raises(ValueError, match="failed"), paused(cluster.kubectl, layout=layout):
        raise ValueError("failed")
    assert cluster.items == Deployments.made().items
