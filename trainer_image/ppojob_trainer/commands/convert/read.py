"""verl's settings, from a script, a command line or a YAML file: dotted names and values.

Hydra's signs before a name (`+`, `++`, `~`) and its options (`--config-name`) are understood; a value is YAML, as
Hydra's own values nearly are. Called by the command line and by `conversion`.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from ppojob_trainer.commands.convert.config_files import base_of, engine_of, flat, folded
from ppojob_trainer.commands.convert.scripts.bash_run import (
    LIMIT_SECONDS,
    Call,
    Recording,
    Sandbox,
    Script,
    best_sandbox,
    evaluate,
)
from ppojob_trainer.commands.convert.scripts.launches import OVERRIDE, Launch, Program, chosen, launch_of, launches
from ppojob_trainer.commands.kubernetes_yaml import in_one_line, parse
from ppojob_trainer.commands.manifest import ManifestError

_OPTION = re.compile(r"--?(config-name|cn|config-path|cp|config-dir|cd)(?:=(.*))?", re.DOTALL)


@dataclass(frozen=True)
class Options:
    """How a script is read."""

    runs: bool | None = None
    """Whether bash evaluates it. None: where a sandbox works."""
    environment: Mapping[str, str] = field(default_factory=dict)
    launch: int | None = None
    """Which of several launches, counted from 1."""
    limit: float = LIMIT_SECONDS


@dataclass(frozen=True)
class Settings:
    """What was given, by verl's names, and what could not be read."""

    values: Mapping[str, Any]
    unconverted: Sequence[tuple[str, Any, str]] = ()
    """Name, value and reason of what is not a setting."""
    is_whole: bool = False
    """Whether it is a whole configuration, with verl's defaults in it, and not only what somebody set."""
    splits: bool = False
    """Half of the GPUs are the actor's, half the critic's."""
    is_one_step_off: bool = False
    """Responses come from the weights of one step before."""
    notes: Sequence[str] = ()
    """How the script was read, and what it would have done besides."""


def variables_of(words: Sequence[str]) -> dict[str, str]:
    """Return the variables of `--env NAME=VALUE`.

    Raises:
        ManifestError: a word is none.
    """
    pairs = [word.partition("=") for word in words]
    wrong = next(
        (word for word, pair in zip(words, pairs, strict=True) if not (pair[0].isidentifier() and pair[1])), None
    )
    if wrong is not None:
        raise ManifestError(f"--env {wrong}: give a name and a value, such as --env NNODES=2")
    return {name: value for name, _, value in pairs}


def read(words: Sequence[str], options: Options | None = None) -> Settings:
    """Read what the command line was given: a file (`-` for standard input) and its arguments, or settings.

    Raises:
        ManifestError: a file cannot be read, or nothing in it is a setting.
    """
    options = options or Options()
    if "=" in words[0] or launch_of(words) is not None:
        return read_arguments(words)
    path = Path(words[0])
    if words[0] == "-":
        with tempfile.TemporaryDirectory(prefix="ppojob-convert-") as folder:
            path = Path(folder) / "standard-input.sh"
            path.write_text(sys.stdin.read(), encoding="utf-8")
            return read_script(Script(path, words[1:], options.environment, "standard input"), options)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ManifestError(f"{path}: it cannot be read: {error}") from error
    if path.suffix in (".yaml", ".yml"):
        return read_yaml(path, text)
    return read_script(Script(path, words[1:], options.environment), options)


def read_script(script: Script, options: Options) -> Settings:
    """Read a launch script; bash evaluates it, or nobody.

    Raises:
        ManifestError: it fails, does not end, or does not start verl once; without bash, it has a branch.
    """
    sandbox = best_sandbox() if options.runs is not False else Sandbox.NONE
    if options.runs or sandbox is not Sandbox.NONE:
        recording = evaluate(script, sandbox, options.limit)
        how = f"in a sandbox ({sandbox}: no network, no writing outside an empty folder)"
        if sandbox is Sandbox.NONE:
            how = "WITHOUT a sandbox: commands in it had your rights"
        notes = [f"bash evaluated {script.name} {how}; python3, ray and other programs were recorded and not started"]
    else:
        from ppojob_trainer.commands.convert.scripts.straight_line import read_straight

        recording = read_straight(script)
        notes = [f"{script.name} was read without bash" + ("" if options.runs is False else _NO_SANDBOX)]
    return settings_of(script, recording, options, notes)


def settings_of(script: Script, recording: Recording, options: Options, notes: Sequence[str] = ()) -> Settings:
    """Return the settings of the launch that was recorded.

    Raises:
        ManifestError: there is none, or several and no choice, or nothing of it can be converted.
    """
    found = launches(recording.calls)
    _refuse_failure(script, recording, found)
    launch = chosen(found, options.launch, script.name, recording.calls)
    settings = _of_launch(launch, script.path, recording)
    unconverted = [*settings.unconverted, *_empty_answers(recording)]
    return replace(settings, unconverted=unconverted, notes=[*notes, *_not_done(recording)])


_NO_SANDBOX = ": neither bwrap nor unshare works on this machine. --run has bash evaluate it without a sandbox"


def _refuse_failure(script: Script, recording: Recording, found: Sequence[Launch]) -> None:
    if found or recording.exit_code == 0:
        return
    at, words = recording.complaints[-1] if recording.complaints else (script.name, recording.last_words or "no reason")
    unbound = re.match(r"(\w+): unbound variable", words)
    remedy = "set what it needs with --env or as its arguments: ppojob convert FILE ARGUMENTS"
    if unbound:
        remedy = f"give it with --env {unbound[1]}=VALUE"
    elif "No such file" in words:
        remedy = "convert a copy of the script without that line"
    raise ManifestError(f"{at}: {words}: the script ended with {recording.exit_code} before it started verl; {remedy}")


def _empty_answers(recording: Recording) -> list[tuple[str, Any, str]]:
    """Programs whose output the script uses: here they printed nothing."""
    why = (
        "the script reads the output of this program, which was not started: set the value with --env, or set "
        "the field by hand"
    )
    return [
        (f"{call.at}: {' '.join(call.words)}"[:200], None, why)
        for call in recording.calls
        if call.is_piped and launch_of(call.words) is None and not _is_harmless(call)
    ]


def _is_harmless(call: Call) -> bool:
    """Whether an empty answer is right: there is no NPU, and `conda shell.bash hook` defines functions only."""
    return call.words[0] in ("conda", "mamba") or any("torch_npu" in word for word in call.words)


def _not_done(recording: Recording) -> list[str]:
    calls = [f"{c.at}: not started: {' '.join(c.words)[:160]}" for c in recording.calls if launch_of(c.words) is None]
    return [*calls, *(f"{at}: bash reported: {words}" for at, words in recording.complaints)]


def _of_launch(launch: Launch, script: Path | None, recording: Recording | None) -> Settings:
    words = [_without_folders(word, recording) for word in launch.words]
    given, options, unread = _sorted_out(words)
    base = base_of(options.get("name", launch.program.config), options.get("path"), script)
    program = launch.program
    unconverted = [*base.unconverted, *((word, None, "this is not a setting: name=value") for word in unread)]
    if program.unconverted is not None:
        unconverted.insert(0, (launch.name, None, program.unconverted))
    values = folded({**base.values, **engine_of(given), **given})
    return Settings(values, unconverted, splits=program.splits, is_one_step_off=program.is_one_step_off)


def _without_folders(word: str, recording: Recording | None) -> str:
    """Undo what only this machine knows: $HOME is written so again, and the empty folder is `.`."""
    if recording is None:
        return word
    return word.replace(recording.home, "$HOME").replace(recording.folder, ".")


def read_arguments(words: Sequence[str]) -> Settings:
    """Read the words of a command line; what stands before the program's name is passed over.

    Raises:
        ManifestError: none of them is a setting, or the program does not train with PPO.
    """
    launch = launch_of(words) or Launch("", Program(""), words, "")
    settings = _of_launch(chosen([launch], None, launch.name), None, None)
    if not settings.values:
        raise ManifestError("there is no setting such as data.train_batch_size=256")
    return settings


def _sorted_out(words: Sequence[str]) -> tuple[dict[str, Any], dict[str, str], list[str]]:
    """Return settings, Hydra's options for its configuration, and the rest."""
    values: dict[str, Any] = {}
    options: dict[str, str] = {}
    unread: list[str] = []
    rest = iter(word for word in words if word.strip())
    for word in rest:
        option, match = _OPTION.fullmatch(word), OVERRIDE.fullmatch(word)
        if option is not None:
            name = "name" if option[1] in ("config-name", "cn") else "path"
            options[name] = option[2] if option[2] is not None else next(rest, "")
        elif match is None or match[1] == "~":
            unread.append(word)
        else:
            values[match[2]] = _value(match[3])
    return values, options, unread


def read_yaml(path: Path, text: str) -> Settings:
    """Read a whole configuration of verl.

    Raises:
        ManifestError: it is none.
    """
    try:
        raw = parse(text)
    except yaml.YAMLError as error:
        raise ManifestError(f"{path}: it is not YAML: {in_one_line(error)}") from error
    if not isinstance(raw, dict) or not {"actor_rollout_ref", "data", "trainer", "algorithm"} & raw.keys():
        raise ManifestError(f"{path}: it is not a configuration of verl: it has no actor_rollout_ref, data or trainer")
    return Settings(dict(flat(raw)), is_whole=True)


def _value(text: str) -> Any:
    # Hydra writes {a:1}, YAML wants {a: 1}.
    spaced = re.sub(r":(?=[^\s/])", ": ", text) if text.startswith("{") else text
    try:
        value = parse(spaced)
    except yaml.YAMLError:
        return text
    return text if value is None and text not in ("null", "None") else value
