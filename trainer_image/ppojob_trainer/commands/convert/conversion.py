"""From verl's settings to a PPOJob, and to the list of what it could not take over.

What is written always passes the checks of `ppojob validate`; a value that they refuse is listed for the user to set.
Called by the command line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Any

import yaml

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.validation import SpecError, parse_manifest
from ppojob_trainer.commands.convert.config_files import is_unset
from ppojob_trainer.commands.convert.draft import Draft
from ppojob_trainer.commands.convert.parts import draft_of
from ppojob_trainer.commands.convert.read import Settings
from ppojob_trainer.commands.convert.rows import Checked, Converted, Ignored, Row, Unsupported
from ppojob_trainer.commands.convert.table import DEFAULTS, TABLE
from ppojob_trainer.commands.convert.values import NotConvertibleError


class Target(StrEnum):
    """What became of a setting that is not a field now."""

    TO_FILL = "fill in"
    UNCONVERTED = "not converted"
    REFUSED = "refused"
    NEEDLESS = "not needed"


@dataclass(frozen=True)
class Entry:
    """A line of the list."""

    kind: Target
    name: str
    value: Any
    why: str


@dataclass(frozen=True)
class Conversion:
    """The PPOJob and the list."""

    manifest: Mapping[str, Any]
    entries: Sequence[Entry]

    @property
    def unconverted(self) -> list[Entry]:
        """Settings that change the run and were not converted."""
        return [entry for entry in self.entries if entry.kind in (Target.UNCONVERTED, Target.REFUSED)]

    @property
    def is_valid(self) -> bool:
        """Whether the PPOJob passes all checks."""
        return not any(entry.kind is Target.REFUSED for entry in self.entries)

    def to_yaml(self) -> str:
        """Return the file; what the user must fill in is at its head."""
        asked = [f"#   spec.{entry.name}: {entry.why}\n" for entry in self.entries if entry.kind is Target.TO_FILL]
        head = ["# Converted from verl's settings. Check:\n", *asked] if asked else []
        body = yaml.safe_dump(dict(self.manifest), sort_keys=False, width=110, allow_unicode=True)
        return "".join(head) + body


def convert(settings: Settings) -> Conversion:
    """Return the PPOJob that corresponds to verl's settings, as far as possible."""
    given = dict(settings.values)
    if settings.is_whole:
        given = {key: value for key, value in given.items() if not is_unset(key, value)}
    given, unresolved = _resolved(given)
    draft = draft_of(given, splits=settings.splits, is_one_step_off=settings.is_one_step_off)
    rows = {name: _row_of(name) for name in draft.given}
    ignored = [Entry(Target.NEEDLESS, k, draft.given[k], r.why) for k, r in rows.items() if isinstance(r, Ignored)]
    for name, value in draft.given.items():
        row = rows[name]
        if not (settings.is_whole and isinstance(row, Unsupported)):
            _apply(draft, row, name, value)
    for target, value in DEFAULTS.items():
        draft.values.setdefault(target, value)
    _drop_what_nobody_reads(draft)
    manifest = _manifest(draft)
    entries = [
        *(Entry(Target.TO_FILL, path, None, why) for path, why in draft.to_fill),
        *(
            Entry(Target.UNCONVERTED, name, value, why)
            for name, value, why in [*settings.unconverted, *unresolved, *draft.unconverted]
        ),
        *_refused(manifest),
        *([] if settings.is_whole else ignored),
    ]
    return Conversion(manifest, entries)


def _resolved(given: dict[str, Any]) -> tuple[dict[str, Any], list[tuple[str, Any, str]]]:
    """Follow `${other.setting}` to what is given; what leads nowhere is a loss."""
    unconverted: list[tuple[str, Any, str]] = []
    resolved: dict[str, Any] = {}
    for name, value in given.items():
        is_variable = isinstance(value, str) and "$" in value and not value.startswith(("$HOME/", "${HOME}/"))
        if not is_variable or isinstance(_row_of(name), Ignored):
            resolved[name] = value
        elif value.startswith("${") and value[2:-1] in given:
            resolved[name] = given[value[2:-1]]
        else:
            unconverted.append((name, value, "this variable is not set: give it a value, or set the field by hand"))
    return resolved, unconverted


def _row_of(name: str) -> Row | None:
    return next((row for row in TABLE if fnmatchcase(name, row.name)), None)


def _apply(draft: Draft, row: Row | None, name: str, value: Any) -> None:
    if row is None:
        draft.unconverted.append((name, value, "this setting of verl is not known"))
    elif isinstance(row, Unsupported) and value is not None:
        draft.unconverted.append((name, value, row.why))
    elif isinstance(row, Converted | Checked) and value is not None:
        try:
            changed = row.change(value)
        except NotConvertibleError as error:
            draft.unconverted.append((name, value, str(error)))
        else:
            if isinstance(row, Converted):
                draft.values |= dict.fromkeys(row.targets, changed)


def _drop_what_nobody_reads(draft: Draft) -> None:
    """Take out the critic where no estimator reads it, and the reward function where a model scores alone."""
    unread: list[str] = []
    if draft.values.get("algorithm.advantageEstimator", "GAE") != "GAE":
        unread += ["critic.", "model.critic."]
        draft.unconverted = [entry for entry in draft.unconverted if not entry[0].startswith("critic.")]
    unread.append("reward.function." if draft.values.get("reward.type") == "Model" else "model.reward.")
    for target in [target for target in draft.values if target.startswith(tuple(unread))]:
        del draft.values[target]


def _manifest(draft: Draft) -> dict[str, Any]:
    spec: dict[str, Any] = {}
    for target, value in sorted(draft.values.items(), key=lambda item: _place(item[0])):
        *parents, last = target.split(".")
        node = spec
        for part in parents:
            if not isinstance(node.get(part), dict):
                node[part] = {}
            node = node[part]
        node[last] = value
    return {
        "apiVersion": constants.API_VERSION,
        "kind": constants.KIND,
        "metadata": {"name": draft.name},
        "spec": spec,
    }


def _place(target: str) -> int:
    """The order in which people read a PPOJob."""
    order = (
        "image", "device", "model", "data", "reward", "algorithm", "actor", "critic", "rollout", "pools", "placement",
        "schedule", "storage", "checkpoint", "trainer", "telemetry",
    )  # fmt: skip
    return order.index(target.partition(".")[0])


def _refused(manifest: Mapping[str, Any]) -> list[Entry]:
    try:
        parse_manifest(manifest)
    except SpecError as error:
        return [
            Entry(Target.REFUSED, field.path.removeprefix("spec."), field.value, field.message)
            for field in error.errors
        ]
    return []
