"""Which of a script's calls start verl, and which of verl's programs each starts.

`ray job submit -- python3 -m ...`, `uv run`, `torchrun` and the like are seen through: what counts is the Python module
or file in the words of a call, and the settings after it. Called by `read`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

from ppojob_trainer.commands.convert.scripts.bash_run import Call
from ppojob_trainer.commands.manifest import ManifestError

OVERRIDE = re.compile(r"(\+{0,2}|~)([A-Za-z_][\w.@/-]*)=(.*)", re.DOTALL)
_DOTTED = re.compile(r"[+~]{0,2}[A-Za-z_]\w*\.[\w.@/-]+=.*", re.DOTALL)


@dataclass(frozen=True)
class Program:
    """One of verl's programs, by its module or file."""

    pattern: str
    config: str = "ppo_trainer"
    """verl's configuration that it takes without --config-name."""
    unconverted: str | None = None
    """How its training differs from that of a PPOJob."""
    refused: str | None = None
    """Why nothing of it can be converted."""
    splits: bool = False
    """Half of the GPUs are the actor's, half the critic's."""
    is_one_step_off: bool = False
    """Responses come from the weights of one step before."""


PROGRAMS = (
    Program(r"verl\.trainer\.main_ppo(_sync)?|(.*/)?verl/trainer/main_ppo\.py"),
    Program(r"(.*[./])?split_placement\.main_ppo_split|(.*/)?main_ppo_split\.py", "ppo_trainer_split", splits=True),
    Program(
        r"verl\.experimental\.transfer_queue\.main_ppo|recipe\.transfer_queue\.main_ppo",
        "transfer_queue_ppo_trainer",
    ),
    Program(r"recipe\.dapo\.main_dapo|dapo\.main_dapo", "dapo_trainer"),
    Program(
        r"(verl\.experimental|recipe)\.one_step_off_policy\.(async_)?main_ppo",
        "one_step_off_ppo_trainer",
        is_one_step_off=True,
    ),
    Program(
        r"(verl\.experimental|recipe)\.fully_async_policy\.fully_async_main",
        refused="fully asynchronous training has no steps of data.train_batch_size prompts, and a PPOJob has no "
        "others: convert a synchronous script of the same model",
    ),
    Program(r"(verl\.experimental|recipe)\.vla\..*", refused="a PPOJob trains language models on text, not robots"),
    Program(r"verl\.trainer\.(fsdp_)?sft_trainer\w*", refused="this is supervised fine-tuning, and a PPOJob is PPO"),
    Program(r"verl\.trainer\.main_generation\w*", refused="this generates responses without training"),
    Program(r"verl\.trainer\.main_eval", refused="this evaluates responses without training"),
)
_UNKNOWN_PROGRAM = "this program is not one of verl's main ones: only its settings were read, not its code"


@dataclass(frozen=True)
class Launch:
    """A call of one of verl's programs."""

    name: str
    """Module or file."""
    program: Program
    words: Sequence[str]
    """What follows the name."""
    at: str


def launches(calls: Sequence[Call]) -> list[Launch]:
    """Return the launches among the calls, in order. Commands that prepare data or merge models are not launches."""
    return [found for call in calls if (found := launch_of(call.words, call.at)) is not None]


def launch_of(words: Sequence[str], at: str = "") -> Launch | None:
    """Return the launch in the words of a command, None if there is none."""
    for number, word in enumerate(words[1:], 1):
        if " -m " in word or ".py " in word:
            # bash -c "python3 -m ..."
            nested = launch_of(_split(word), at)
            if nested is not None:
                return nested
        is_module = words[number - 1] == "-m"
        if not is_module and not word.endswith(".py"):
            continue
        program = next((program for program in PROGRAMS if re.fullmatch(program.pattern, word)), None)
        rest = words[number + 1 :]
        if program is None and any(_DOTTED.fullmatch(word) for word in rest):
            program = Program(re.escape(word), unconverted=_UNKNOWN_PROGRAM)
        if program is not None:
            return Launch(word, program, rest, at)
    return None


def _split(word: str) -> list[str]:
    try:
        return shlex.split(word)
    except ValueError:
        return []


def chosen(found: Sequence[Launch], number: int | None, script: str, calls: Sequence[Call] = ()) -> Launch:
    """Return the one launch, or the one of that number, counted from 1.

    Args:
        calls: everything that the script would have started, for the message.

    Raises:
        ManifestError: there is none, or several and no number, or nothing of it can be converted.
    """
    listed = "".join(f"\n  {place}: {launch.at}: {launch.name}" for place, launch in enumerate(found, 1))
    if not found:
        started = "".join(f"\n  {call.at}: {' '.join(call.words)[:160]}" for call in calls)
        what = "it does not start verl, for example with python3 -m verl.trainer.main_ppo"
        raise ManifestError(f"{script}: {what}{'; it starts' * bool(started)}{started}")
    if number is None and len(found) > 1:
        raise ManifestError(f"{script}: it starts verl {len(found)} times: choose one with --launch N{listed}")
    if number is not None and not 1 <= number <= len(found):
        raise ManifestError(f"{script}: --launch {number}: it starts verl {len(found)} times{listed}")
    launch = found[(number or 1) - 1]
    if launch.program.refused is not None:
        raise ManifestError(f"{launch.at or script}: {launch.name}: {launch.program.refused}")
    return launch
