"""The reference pages have every name of the code, and none that the code does not have."""

from __future__ import annotations

import ast
import re
from enum import StrEnum
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.algorithm import AdvantageEstimator, AlgorithmSpec, KLControllerType, KLEstimator, PolicyLoss
from ppojob_api.v1alpha1.constants import STATUS_METRICS, Condition, Phase, Reason
from ppojob_api.v1alpha1.fixed import MUTABLE
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.reward import RewardType
from ppojob_api.v1alpha1.runtime import GangScheduler
from ppojob_api.v1alpha1.telemetry import Tracker
from ppojob_api.v1alpha1.training import LossAggregation, ScheduleMode
from ppojob_api.v1alpha1.validation import SpecError, parse_spec
from ppojob_operator.status_server.metrics import OperatorMetrics
from ppojob_trainer.engines.train.fsdp import families
from ppojob_trainer.main import failures
from tests.bad_specs import GOOD
from tests.unit.trainer.engines.test_engine_families import FAMILIES
from tools.site import support

DOCS = Path("docs")
ALGORITHMS = (DOCS / "algorithms.md").read_text()
CONDITIONS, CONCEPTS, METRICS, MATRIX = (
    (DOCS / f"{name}.md").read_text() for name in ("conditions", "concepts", "metrics", "support-matrix")
)
CODE = re.compile(r"`([^`\n]+)`")


def values(names: type) -> set[str]:
    """Return the constants of a class."""
    return {value for name, value in vars(names).items() if not name.startswith("_") and isinstance(value, str)}


def section(page: str, heading: str) -> str:
    """Return a section of a page."""
    return page.split(f"\n## {heading}\n")[1].split("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """Return the cells of all rows of the tables in a text, without heads."""
    found: list[list[str]] = []
    for line in text.splitlines():
        if line.startswith("|---"):
            found.pop()
        elif line.startswith("|"):
            found.append([cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]])
    return found


def test_every_reason_is_explained() -> None:
    named = {code for row in rows(CONDITIONS) for cell in row[:-1] for code in CODE.findall(cell)}

    assert values(Reason) - named == set()
    assert {name for name in named if name[0].isupper()} - values(Reason) - values(Condition) == {
        "True",
        "False",
        "Unknown",
    }


def test_every_condition_and_every_phase_is_explained() -> None:
    explained = {code for row in rows(section(CONCEPTS, "Phases and conditions")) for code in CODE.findall(row[0])}

    assert explained == values(Condition) | values(Phase)


def kinds() -> dict[str, set[str]]:
    """Return the kinds of the trainer's failures, by reason."""
    found: dict[str, set[str]] = {}
    for _, reason, kind in failures._NAMES:
        found.setdefault(reason, set()).add(kind)
    for reason, kind in failures._ENGINE_KINDS.items():
        found.setdefault(reason, set()).add(kind)
    # Of a graceful stop, which is not a failure.
    del found[Reason.INTERRUPTED]
    found[Reason.TRAINER_FAILED].add(FailureKind.USER)
    return found


@pytest.mark.parametrize(
    ("reason", "expected"), kinds().items(), ids=lambda value: str(value) if isinstance(value, str) else ""
)
def test_a_failure_has_its_kind(reason: str, expected: set[str]) -> None:
    [row] = [row for row in rows(section(CONDITIONS, "Failures")) if row[0] == f"`{reason}`"]

    assert {kind for kind in FailureKind if kind.value.lower() in row[1]} == expected


def test_every_field_that_may_change_while_a_job_runs_is_named() -> None:
    named = set(CODE.findall((DOCS / "changing-a-running-job.md").read_text()))
    last = {path: path.rpartition(".")[2] for path in MUTABLE}

    assert {path for path, name in last.items() if not {path, name} & named} == set()


def test_the_metrics_of_the_status_are_listed() -> None:
    listed = [code for row in rows(section(METRICS, "Metrics of the trainer")) for code in CODE.findall(row[1])]

    assert sorted(listed) == sorted(STATUS_METRICS)


def test_the_operators_metrics_are_listed() -> None:
    listed = {CODE.findall(row[0])[0].partition("{")[0] for row in rows(section(METRICS, "Metrics of the operator"))}
    exposed = {
        f"{family.name}_total" if family.type == "counter" else family.name
        for family in OperatorMetrics().registry.collect()
    }

    assert listed == {name for name in exposed if name.startswith("ppojob_")}


def test_the_matrix_has_the_estimators_and_whether_they_need_a_critic() -> None:
    listed = {CODE.findall(row[0])[0]: row[1] for row in rows(section(MATRIX, "Algorithms")) if row[0].startswith("`")}
    found = {each.value: AlgorithmSpec(advantage_estimator=each).needs_critic for each in AdvantageEstimator}

    assert {name: listed[name] == "required" for name in found} == found


@pytest.mark.parametrize(("heading", "names"), [("Estimators", AdvantageEstimator), ("Policy losses", PolicyLoss)])
def test_the_page_of_algorithms_has_all_names(heading: str, names: type[StrEnum]) -> None:
    listed = [CODE.findall(row[0])[0] for row in rows(section(ALGORITHMS, heading))]

    assert listed == [each.value for each in names]


def test_the_matrix_has_the_policy_losses() -> None:
    head = "| `algorithm.policyLoss` |"
    listed = [CODE.findall(row[0]) for row in rows(head + MATRIX.split(head)[1].split("\n\n")[0])]

    assert [name for names in listed for name in names] == [each.value for each in PolicyLoss]


def test_the_page_of_algorithms_has_the_examples_functions() -> None:
    def functions(source: str) -> list[str]:
        """Return the functions without their docstrings."""
        found = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        for node in found:
            node.body = node.body[1:] if ast.get_docstring(node) else node.body
        return [ast.unparse(node) for node in found]

    source = Path("examples/12-own-algorithm/algorithm.py").read_text()
    shown = ALGORITHMS.split("```python\n")[1].split("```")[0]

    assert functions(shown) == functions(source)
    assert len(source.splitlines()) < 30


@pytest.mark.parametrize(
    ("field", "names"),
    [
        ("algorithm.kl.estimator", KLEstimator),
        ("algorithm.kl.controller.type", KLControllerType),
        ("actor.lossAggregation", LossAggregation),
        ("reward.type", RewardType),
        ("telemetry.trackers", Tracker),
        ("runPolicy.gangScheduler", GangScheduler),
    ],
)
def test_the_matrix_has_the_values_of_a_field(field: str, names: type[StrEnum]) -> None:
    [row] = [row for row in rows(MATRIX) if f"`{field}`" in row[0]]

    assert set(CODE.findall(row[1])) == {each.value for each in names} - {"None"}


def test_the_modes_of_the_schedule_are_explained() -> None:
    explained = {CODE.findall(row[0])[0] for row in rows(section(CONCEPTS, "A step, and what overlaps")) if row[0]}

    assert {mode.value for mode in ScheduleMode} <= explained


def test_the_matrix_has_the_table_of_families() -> None:
    assert support.page(MATRIX) == MATRIX, "run `make generate`"
    tested = "| family |" + MATRIX.split("| family |")[1].split("\n\n")[0]
    assert {CODE.findall(row[0])[0] for row in rows(tested)} == {family for family, _ in FAMILIES.values()}


def test_a_page_without_a_place_for_the_families_is_refused() -> None:
    with pytest.raises(ValueError, match="has no place for the families: it needs"):
        support.page("# Support matrix\n")


def test_the_matrix_has_what_is_refused_of_a_model() -> None:
    refused = "| refused | reason |" + MATRIX.split("| refused | reason |")[1].split("\n\n")[0]
    named = {code for row in rows(refused) for code in CODE.findall(row[0])}

    known = {*families._NEUTRAL, *families._ATTENTIONS, *families._ROPE_OF_A_BATCH}
    assert known <= named
    assert named - known == {"maxPromptLength", "maxResponseLength"}


OPTIONS: dict[str, dict[str, Any]] = {
    "gradientCheckpointing": {"gradientCheckpointing": True},
    "compile": {"compile": True},
    "offload": {"offload": {"parameters": True, "optimizer": True}},
    "activationOffload": {"activationOffload": True},
    "lora": {"lora": {}},
}
SIZES: list[dict[str, int]] = [
    {},
    {"sequenceParallelSize": 2},
    {"tensorParallelSize": 2},
    {"pipelineParallelSize": 2},
    {"expertParallelSize": 2},
]


def is_refused(model: dict[str, Any], training: dict[str, Any]) -> bool:
    """Return whether the spec with these settings of the actor is refused."""
    spec = {**GOOD["spec"], "pools": [{"name": "actor", "gpusPerNode": 2}, {"name": "critic", "gpusPerNode": 1}]}
    spec["model"] = {**spec["model"], "actor": {**spec["model"]["actor"], **model}}
    spec["actor"] = {**spec.get("actor", {}), **training}
    try:
        resolve(parse_spec(spec))
    except SpecError:
        return True
    return False


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("column", range(len(SIZES)))
def test_the_matrix_says_which_options_are_refused(option: str, column: int) -> None:
    [row] = [row for row in rows(MATRIX) if row[0] == f"`{option}`"]

    assert (row[1 + column] == "refused") == is_refused(OPTIONS[option], SIZES[column])


def test_the_matrix_says_that_a_group_needs_a_node() -> None:
    assert is_refused({}, {"tensorParallelSize": 2, "sequenceParallelSize": 2})
    assert not is_refused({}, {"tensorParallelSize": 2, "sequenceParallelSize": 1})
    assert is_refused({}, {"fsdpSize": 2, "tensorParallelSize": 2})
    assert is_refused({}, {"fsdpSize": 2, "pipelineParallelSize": 2})
    assert is_refused({}, {"tensorParallelSize": 2, "pipelineParallelSize": 2})
    assert is_refused({}, {"pipelineParallelSize": 2, "expertParallelSize": 2})
    assert is_refused({}, {"virtualPipelineParallelSize": 2})
    assert not is_refused({}, {"pipelineParallelSize": 2, "virtualPipelineParallelSize": 2})
    assert not is_refused({}, {"sequenceParallelSize": 2, "expertParallelSize": 2})
    assert not is_refused({}, {"tensorParallelSize": 2, "expertParallelSize": 2})
