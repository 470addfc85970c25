"""Specs that a user could send: those of the examples, with fields set to values of the CRD's schema and to wrong ones.

Called by tests/unit/operator/test_fuzzed_specs.py, without an API server, and by
tests/integration/operator/test_fuzzed_jobs.py, with one. `make fuzz` runs both for longer. Free-form fields (pod
templates, tolerations, environment) get fragments of core/v1 with right and wrong types, which the API server checks
only when an object is created from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

PROJECT = Path(__file__).resolve().parents[2]
Keys = tuple[str, ...]
CLAIM = "data"
"""The claim of every spec, unless it is changed."""
ITEM = "[]"
"""In a path: an item of a list."""
_MAX_SCHEMA = 2_000
"""Characters of the largest schema that is generated as a whole; a larger one is generated field by field."""
_INT64 = 2**63

WRONG: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 0.5, -0.5, 2**31, _INT64 - 1, -_INT64, 1e30),
    *("", " ", "a", "a b;c", "\x00", "é", "5", "-1", "1Gi", "0", "true", "..", "/", "/proc", "/data/../etc", "a/b/c/d"),
    *("hf://", "hf://acme/tiny", "hf://acme/tiny@", "s3://", "s3://b/../x", "gs://bucket/key", "x" * 300, "x" * 5_000),
    *([], {}, [None], [[]], {"": ""}, {"a": None}, {"a": {"b": []}}, ["a", "a"], [{"name": "a"}, {"name": "a"}]),
)
_NAMES = ("actor", "critic", "all", "head", "ray-head", "ray-worker", "data", "shm", "x" * 64, "A", "a.b", "")
_MOUNTS = [{"name": "data", "mountPath": "/data"}, {"name": "other", "mountPath": "/dev/shm"}]
_KEYS: tuple[Any, ...] = (["a"], {"a": "b"}, None, 5)
"""Wrong values of the keys by which lists are merged."""
_NOTHING = tuple({name: None} for name in ("env", "lifecycle", "volumeMounts", "securityContext", "image"))


def _ours(**fields: Any) -> list[list[dict[str, Any]]]:
    """Return the containers that change Ray's, of a worker and of the head."""
    return [[{"name": name, **fields}] for name in ("ray-worker", "ray-head")]


FRAGMENTS: dict[Keys, tuple[Any, ...]] = {
    ("metadata",): (None, {"name": "mine"}, {"namespace": "default"}, {"finalizers": ["a/b"]}, {"ownerReferences": []}),
    ("metadata", "labels"): (
        {"a": "b"},
        {"a": 1},
        ["a"],
        {"a b": "c"},
        {"ppojob.dev/job": "another"},
        {"a": "x" * 64},
        None,
        [],
    ),
    ("metadata", "annotations"): (None, {"a": "b"}, {"a": True}, "a", {"ray.io/x": "y"}),
    ("spec",): (None, {"nonsense": 1}, {"": 1}, [], "x"),
    ("spec", "nodeSelector"): ({"gpu": "a"}, {"gpu": True}, [], {"a b": "c"}),
    ("spec", "tolerations"): (
        [{"key": "a", "operator": "Exists"}],
        [{"key": "a", "operator": "Sometimes"}],
        [{"tolerationSeconds": "5"}],
        {"key": "a"},
        None,
        *([{"key": key}] for key in _KEYS),
    ),
    ("spec", "containers"): (
        None,
        *([{"name": key}] for key in _KEYS),
        *(each for fields in _NOTHING for each in _ours(**fields)),
        *(each for key in _KEYS for each in _ours(env=[{"name": key, "value": "x"}])),
        *(each for key in _KEYS for each in _ours(volumeMounts=[{"name": "storage", "mountPath": key}])),
        *(each for key in ("80", *_KEYS[:3]) for each in _ours(ports=[{"containerPort": key}])),
        [{"name": "sidecar", "image": "busybox"}],
        [{"name": "sidecar"}],
        [{"image": "busybox"}],
        [{"name": "a", "image": "b"}, {"name": "a", "image": "b"}],
        [{"name": "ray-worker", "command": ["sh"]}],
        [{"name": "ray-worker", "resources": {"limits": {"cpu": 1}}}],
        [{"name": "ray-head", "env": [{"name": "A", "value": 1}]}],
        [{"name": "ray-worker", "volumeMounts": _MOUNTS}],
        [{"name": "ray-worker", "lifecycle": {"preStop": {"exec": {"command": ["true"]}}}}],
        [{"name": "ray-worker", "ports": [{"containerPort": 70_000}]}],
        [None],
        "sidecar",
    ),
    ("spec", "initContainers"): ([{"name": "first", "image": "busybox"}], [{"name": 5}], {}, [{"name": ["a"]}], None),
    ("spec", "volumes"): (
        None,
        *([{"name": key, "emptyDir": {}}] for key in _KEYS),
        [{"name": "other", "emptyDir": {}}],
        [{"name": "other"}],
        [{"name": "data", "emptyDir": {}}],
        [{"name": "other", "hostPath": {"path": "/"}}],
        [{"name": "other", "emptyDir": {"sizeLimit": "much"}}],
        [{"name": "other", "emptyDir": {}, "configMap": {"name": "a"}}],
    ),
    ("spec", "affinity"): ({}, None, {"nodeAffinity": []}, {"podAntiAffinity": {"nonsense": []}}, "x"),
    ("spec", "topologySpreadConstraints"): (
        *([{"maxSkew": 0}], [{}], "x", None),
        *([{"topologyKey": key}] for key in _KEYS),
    ),
    ("spec", "securityContext"): (
        None,
        {"fsGroup": None},
        {"runAsUser": 0},
        {"runAsUser": "root"},
        {"fsGroup": -1},
        [],
    ),
    ("spec", "terminationGracePeriodSeconds"): (30, -1, "30"),
    ("spec", "schedulerName"): ("other", 5, ""),
    ("spec", "runtimeClassName"): ("nvidia", "A B", 5),
    ("spec", "priorityClassName"): ("urgent", "A B"),
    ("spec", "imagePullSecrets"): (
        [{"name": "a"}],
        [{"name": "a"}, {"name": "a"}],
        ["a"],
        [{}],
        *([{"name": key}] for key in _KEYS),
    ),
    ("spec", "hostPID"): (True,),
    ("spec", "hostIPC"): (True,),
    ("spec", "hostNetwork"): (True, "yes"),
    ("spec", "restartPolicy"): ("Always", "Sometimes"),
    ("spec", "serviceAccountName"): ("default",),
    ("spec", "hostAliases"): ([{"ip": "10.0.0.1", "hostnames": ["a"]}], [{"ip": 5}]),
    ("spec", "dnsPolicy"): ("None", "Default", 5),
    ("spec", "resourceClaims"): (
        [{"name": "gpu"}],
        [{"name": "gpu", "resourceClaimName": "a"}],
        "x",
        [{"name": ["a"]}],
    ),
}
"""Parts of a pod template by their path."""
FREE: dict[str, tuple[Any, ...]] = {
    "tolerations": FRAGMENTS["spec", "tolerations"],
    "env": (
        [{"name": "A", "value": "b"}],
        [{"name": "A", "value": 5}],
        [{"name": "A"}, {"name": "A"}],
        [{"name": "RAY_ADDRESS", "value": "x"}],
        [{"name": "A", "valueFrom": {}}],
        [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "a"}}}],
        [{"name": "A B", "value": "c"}],
        [{"value": "c"}],
    ),
    "envFrom": ([{"secretRef": {"name": "a"}}], [{"secretRef": {}}], [{"prefix": "1"}], [{"nonsense": {}}]),
    "imagePullSecrets": FRAGMENTS["spec", "imagePullSecrets"],
}
"""Other fields that the schema leaves free."""


def examples() -> list[dict[str, Any]]:
    """Return the specs of the PPOJobs in examples/ that need no template; the caller may change them."""
    return deepcopy(_examples())


@cache
def _examples() -> list[dict[str, Any]]:
    files = sorted((PROJECT / "examples").glob("*/*.yaml"))
    documents = [document for file in files for document in yaml.safe_load_all(file.read_text()) if document]
    specs = [document["spec"] for document in documents if document.get("kind") == "PPOJob"]
    return [spec for spec in specs if "templateRef" not in spec]


def schema() -> dict[str, Any]:
    """Return the CRD's schema of a spec."""
    definition = yaml.safe_load((PROJECT / "crds" / "ppojobs.ppojob.dev.yaml").read_text())
    found: dict[str, Any] = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
    return found


def _paths(node: dict[str, Any], path: Keys = ()) -> Iterator[tuple[Keys, dict[str, Any]]]:
    """Yield every field of a schema with its path."""
    if path:
        yield path, node
    for name, child in node.get("properties", {}).items():
        yield from _paths(child, (*path, name))
    if isinstance(node.get("items"), dict):
        yield from _paths(node["items"], (*path, ITEM))
    if isinstance(node.get("additionalProperties"), dict):
        yield from _paths(node["additionalProperties"], (*path, "key"))


def of_schema(node: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Return the values that a structural schema of Kubernetes describes.

    hypothesis-jsonschema would do, but 0.23 does not run with today's Hypothesis.
    """
    if node.get("x-kubernetes-int-or-string"):
        return _integers(node) | _texts(node)
    if "enum" in node:
        return st.sampled_from(node["enum"])
    return _OF_TYPE.get(node.get("type", ""), _anything)(node)


def _anything(_: dict[str, Any]) -> st.SearchStrategy[Any]:
    return st.sampled_from(WRONG)


def _objects(node: dict[str, Any]) -> st.SearchStrategy[dict[str, Any]]:
    if "properties" in node:
        fields = {name: of_schema(child) for name, child in node["properties"].items()}
        required = {name: fields.pop(name) for name in node.get("required", [])}
        return st.fixed_dictionaries(required, optional=fields)
    free = node.get("additionalProperties")
    values = of_schema(free) if isinstance(free, dict) else _anything(node)
    return st.dictionaries(st.text(max_size=10), values, max_size=3)


def _lists(node: dict[str, Any]) -> st.SearchStrategy[list[Any]]:
    least = node.get("minItems", 0)
    return st.lists(of_schema(node["items"]), min_size=least, max_size=least + 3)


def _numbers(node: dict[str, Any]) -> st.SearchStrategy[float]:
    return st.floats(node.get("minimum"), node.get("maximum"), allow_nan=False, allow_infinity=False)


def _integers(node: dict[str, Any]) -> st.SearchStrategy[int]:
    least, most = node.get("minimum", -_INT64), node.get("maximum", _INT64 - 1)
    return st.integers(math.ceil(least), math.floor(most))


def _texts(node: dict[str, Any]) -> st.SearchStrategy[str]:
    if "pattern" in node:
        return st.from_regex(node["pattern"]).filter(lambda text: len(text) <= node.get("maxLength", len(text)))
    return st.text(min_size=node.get("minLength", 0), max_size=min(node.get("maxLength", 30), 30))


_OF_TYPE: dict[str, Callable[[dict[str, Any]], st.SearchStrategy[Any]]] = {
    "object": _objects,
    "array": _lists,
    "integer": _integers,
    "number": _numbers,
    "string": _texts,
    "boolean": lambda _: st.booleans(),
}


@cache
def _values(path: Keys) -> st.SearchStrategy[Any]:
    """Return the values of a field: those of the schema, fragments if it is free, and wrong ones."""
    node = _FIELDS[path]
    wrong = st.sampled_from(WRONG) | st.sampled_from(_NAMES)
    if path[-1] == "podTemplate":
        return pod_templates() | wrong
    if path[-1] in FREE:
        return st.sampled_from(FREE[path[-1]]) | wrong
    if len(json.dumps(node)) > _MAX_SCHEMA:
        return wrong
    return of_schema(node) | wrong


_FIELDS = dict(_paths(schema()))
_POD_TEMPLATES = [path for path in _FIELDS if path[-1] == "podTemplate"]
_FREE_FIELDS = [path for path in _FIELDS if path[-1] in FREE]
_BASES = [{**spec, "storage": {**spec["storage"], "claimName": CLAIM}} for spec in examples()]


@st.composite
def pod_templates(draw: st.DrawFn) -> Any:
    """Draw a pod template with one to three fragments."""
    template: dict[str, Any] = {}
    for _ in range(draw(st.integers(1, 3))):
        path = draw(st.sampled_from(sorted(FRAGMENTS)))
        put(template, path, draw(st.sampled_from(FRAGMENTS[path])))
    return template


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a spec: an example's with one to three fields set, or removed."""
    spec = deepcopy(_BASES[draw(st.integers(0, len(_BASES) - 1))])
    for _ in range(draw(st.sampled_from((1, 1, 1, 2, 3)))):
        if draw(st.integers(0, 9)) < 9:
            # The rules refuse most wrong values elsewhere, and free fields come to the API server as they are.
            path = draw(st.sampled_from(draw(st.sampled_from((_POD_TEMPLATES, _FREE_FIELDS, list(_FIELDS))))))
            put(spec, path, draw(_values(path)))
        else:
            remove(spec, draw(st.sampled_from(list(_FIELDS))))
    return spec


def put(target: Any, path: Keys, value: Any) -> None:
    """Set a value below `target`; missing containers on the path are created, and other values are replaced."""
    for here, following in pairwise(path):
        empty: Any = [] if following == ITEM else {}
        child = _child(target, here)
        if not isinstance(child, type(empty)):
            child = empty
            _set(target, here, child)
        target = child
    _set(target, path[-1], deepcopy(value))


def remove(target: Any, path: Keys) -> None:
    """Remove a value, if it is there."""
    for name in path[:-1]:
        target = _child(target, name)
    if isinstance(target, dict):
        target.pop(path[-1], None)
    elif isinstance(target, list) and target and path[-1] == ITEM:
        target.pop()


def _child(target: Any, name: str) -> Any:
    if isinstance(target, list):
        return target[-1] if target and name == ITEM else None
    return target.get(name) if isinstance(target, dict) else None


def _set(target: Any, name: str, value: Any) -> None:
    if isinstance(target, list):
        target[-1:] = [value]
    else:
        target[name] = value
