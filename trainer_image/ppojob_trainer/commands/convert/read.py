"""verl's settings, from a script, a command line or a YAML file: dotted names and values.

Hydra's signs before a name (`+`, `++`, `~`) and its options (`--config-name`) are understood; a value is YAML, as
Hydra's own values nearly are.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from ppojob_trainer.commands.convert.shell_words import commands
from ppojob_trainer.commands.kubernetes_yaml import parse
from ppojob_trainer.commands.manifest import ManifestError

_OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/]*)=(.*)", re.DOTALL)
_PROGRAM = re.compile(r"verl\.trainer\.main_ppo\w*|(.*/)?main_ppo\w*\.py")
# verl's own default; further words of the script's caller; and what is left of `2>&1`.
_HARMLESS = ("--config-name=ppo_trainer", "--config-name=ppo_trainer.yaml", "$@", "2")
WHOLE = {
    "data.apply_chat_template_kwargs",
    "custom_reward_function.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
}
"""Settings whose value is an object."""


@dataclass(frozen=True)
class Settings:
    """What was given, by verl's names, and what could not be read."""

    values: Mapping[str, Any]
    unread: Sequence[str] = field(default_factory=tuple)
    is_whole: bool = False
    """Whether it is a whole configuration, with verl's defaults in it, and not only what somebody set."""


def read(words: Sequence[str]) -> Settings:
    """Read what the command line was given: one file, `-` for a script on standard input, or settings.

    Raises:
        ManifestError: a file cannot be read, or nothing in it is a setting.
    """
    if len(words) != 1 or "=" in words[0]:
        return read_arguments(words)
    path = Path(words[0])
    try:
        return read_file(path, sys.stdin.read() if words[0] == "-" else path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: it cannot be read: {error}") from error


def read_file(path: Path, text: str) -> Settings:
    """Read a script, or a YAML file of verl's configuration.

    Raises:
        ManifestError: neither.
    """
    if path.suffix in (".yaml", ".yml"):
        return _of_yaml(path, text)
    found = [words for words in commands(text) if any(_PROGRAM.fullmatch(word) for word in words)]
    if len(found) > 1:
        raise ManifestError(f"{path}: it starts verl.trainer.main_ppo {len(found)} times: give one of the commands")
    if found:
        return read_arguments(found[0])
    words = [word for command in commands(text) for word in command]
    if any(_OVERRIDE.fullmatch(word) for word in words):
        return read_arguments(words)
    raise ManifestError(
        f"{path}: there is no command with verl.trainer.main_ppo in it, and no setting such as "
        "data.train_batch_size=256"
    )


def read_arguments(words: Sequence[str]) -> Settings:
    """Read the words of a command line; what stands before the program's name is passed over.

    Raises:
        ManifestError: none of them is a setting.
    """
    start = next((number + 1 for number, word in enumerate(words) if _PROGRAM.fullmatch(word)), 0)
    values: dict[str, Any] = {}
    unread: list[str] = []
    for word in words[start:]:
        match = _OVERRIDE.fullmatch(word)
        if match is None or match[1] == "~":
            unread += [] if word in _HARMLESS else [word]
            continue
        values[match[2]] = _value(match[3])
    if not values:
        raise ManifestError("there is no setting such as data.train_batch_size=256")
    return Settings(values, unread)


def _of_yaml(path: Path, text: str) -> Settings:
    try:
        raw = parse(text)
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: it is no YAML: {' '.join(str(error).split())}") from error
    if not isinstance(raw, dict) or not {"actor_rollout_ref", "data", "trainer", "algorithm"} & raw.keys():
        raise ManifestError(f"{path}: it is no configuration of verl: it has no actor_rollout_ref, data or trainer")
    return Settings(dict(_flat(raw, "")), is_whole=True)


def _flat(raw: Mapping[str, Any], prefix: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in WHOLE:
            found += _flat(value, f"{name}.")
        else:
            found.append((name, value))
    return found


def _value(text: str) -> Any:
    # Hydra writes {a:1}, YAML wants {a: 1}.
    spaced = re.sub(r":(?=[^\s/])", ": ", text) if text.startswith("{") else text
    try:
        value = parse(spaced)
    except yaml.YAMLError:
        return text
    return text if value is None and text not in ("null", "None", "") else value
