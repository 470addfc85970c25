"""A resolved spec with two pools, for the tests of manifests."""

from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec


@pytest.fixture
def make_spec() -> Callable[..., PPOJobSpec]:
    """Return a maker of resolved specs, with sections replaced."""

    def make(**changes: Any) -> PPOJobSpec:
        raw = {
            "image": "trainer:1",
            "model": {"actor": {"path": "/data/model"}},
            "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 16},
            "reward": {"function": {"module": "rewards"}},
            "actor": {"miniBatchSize": 8},
            "critic": {"miniBatchSize": 8},
            "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}],
            "placement": {"actor": "actor", "critic": "critic"},
            "storage": {"claimName": "data"},
        }
        return resolve(parse_spec({**raw, **changes}))

    return make
