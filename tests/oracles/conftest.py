"""Each oracle answers once for all tests of its file."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.oracles.environments import Oracle
from tests.oracles.random_cases import CASES, make_case, to_file

Answers = Callable[..., Tensor]


@pytest.fixture(scope="session")
def cases() -> dict[str, dict[str, Tensor]]:
    return {name: make_case(name) for name in CASES}


@pytest.fixture
def case(cases: dict[str, dict[str, Tensor]], name: str) -> dict[str, Tensor]:
    """The inputs of a name; each oracle's file says which names it can answer."""
    return cases[name]


@pytest.fixture(scope="module")
def answers_of(
    cases: dict[str, dict[str, Tensor]], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], dict[str, Tensor]]:
    def ask(name: str) -> dict[str, Tensor]:
        found = Oracle(name).answers(to_file(cases), tmp_path_factory.mktemp(name))
        return {key: torch.from_numpy(value) for key, value in found.items()}

    return ask
