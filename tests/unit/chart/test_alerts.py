"""Each alert fires when it should and not before, and says what to do."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.monitoring import expressions, prometheus

CASES = Path(prometheus.__file__).with_name("alerts_test.yaml")
WATCHING = Path(__file__).resolve().parents[3] / "docs" / "watching-a-run.md"
RULES = [rule for group in expressions.alert_rules()["groups"] for rule in group["rules"]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder for promtool."""
    if not prometheus.are_installed():
        pytest.skip(prometheus.MISSING)
    return tmp_path


def test_promtool_takes_the_rules(folder: Path) -> None:
    (folder / "rules.yaml").write_text(yaml.safe_dump(expressions.alert_rules()))

    assert f"{len(RULES)} rules found" in prometheus.promtool("check", "rules", "rules.yaml", folder=folder)


def test_every_alert_fires_on_its_series_and_not_before(folder: Path) -> None:
    groups = expressions.alert_rules()["groups"]
    # promtool compares annotations word by word, and 2.42 knows no names of tests.
    plain = [{**group, "rules": [without(rule, "annotations") for rule in group["rules"]]} for group in groups]
    (folder / "rules.yaml").write_text(yaml.safe_dump({"groups": plain}))
    cases = yaml.safe_load(CASES.read_text())
    cases["tests"] = [without(case, "name") for case in cases["tests"]]
    (folder / CASES.name).write_text(yaml.safe_dump(cases))

    assert "SUCCESS" in prometheus.promtool("test", "rules", CASES.name, folder=folder)


def without(mapping: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in mapping.items() if name != key}


def test_every_alert_is_tested_firing_and_silent() -> None:
    cases = [each for case in yaml.safe_load(CASES.read_text())["tests"] for each in case["alert_rule_test"]]

    tested = {(case["alertname"], bool(case["exp_alerts"])) for case in cases}
    assert tested == {(rule["alert"], fires) for rule in RULES for fires in (True, False)}


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_says_what_has_happened_and_what_to_do(rule: dict[str, Any]) -> None:
    assert rule["labels"]["severity"] in ("warning", "critical")
    assert rule["annotations"].keys() == {"summary", "description"}
    assert rule["annotations"]["summary"].endswith(".")
    assert len(rule["annotations"]["description"].split()) >= 10


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_an_alert_is_in_the_document(rule: dict[str, Any]) -> None:
    assert f"`{rule['alert']}`" in WATCHING.read_text()


def test_the_limit_of_the_gap_is_the_documents_and_the_dashboards() -> None:
    [alert] = [rule for rule in RULES if rule["alert"] == "PPOJobRolloutDiffers"]
    panels = expressions.panels_of(expressions.dashboards()["job"])
    [line] = [panel["threshold"] for panel in panels if "threshold" in panel]
    [documented] = re.findall(r"if the mean is above ([0-9.]+) after", WATCHING.read_text())

    [of_corrected] = re.findall(r"algorithm.rolloutCorrection`[^|]*, above ([0-9]\.[0-9]+)", WATCHING.read_text())

    assert f"> {documented} unless" in alert["expr"]
    assert f"> {of_corrected})" in alert["expr"]
    assert line == float(documented)
