"""verl's configuration files that a launch names beside its own settings: `--config-name` and `--config-path`.

verl's own two configurations are known by the table. Any other is read where it can be found beside the script; its
list of defaults may name those two. Called by `read`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from ppojob_trainer.commands.kubernetes_yaml import parse

PLAIN = "ppo_trainer"
# What verl's configurations have besides `ppo_trainer`, as far as a row of the table reads it.
_OWN: dict[str, dict[str, Any]] = {
    PLAIN: {},
    "ppo_megatron_trainer": {
        "actor_rollout_ref.actor.strategy": "megatron",
        "critic.strategy": "megatron",
    },
}
# And what the choice of an engine changes.
_ENGINES: dict[str, dict[str, Any]] = {
    "veomni": {
        "actor_rollout_ref.actor.optim.lr_scheduler_type": "cosine",
        "critic.optim.lr_scheduler_type": "cosine",
    }
}
_REMEDY = (
    "where verl is installed, add `--cfg job --resolve` to the launch, and convert the YAML that it prints instead"
)


@dataclass
class Base:
    """The settings in configuration files, which a launch's own settings override."""

    values: dict[str, Any] = field(default_factory=dict)
    unconverted: list[tuple[str, Any, str]] = field(default_factory=list)
    """Option, its value, and what is not known of it."""


def engine_of(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what a setting `model_engine` brings with it."""
    return _ENGINES.get(str(values.get("model_engine")), {})


def base_of(name: str, folder: str | None, beside: Path | None) -> Base:
    """Return the settings of a configuration.

    Args:
        name: with or without `.yaml`.
        folder: what the launch says of where it is, if anything; relative where it is not known in which folder the
            script was meant to run.
        beside: the script.
    """
    name = name.removesuffix(".yaml")
    if name in _OWN:
        return Base(dict(_OWN[name]))
    file = _found(f"{name}.yaml", folder, beside)
    if file is None:
        why = f"{name}.yaml is not beside the script: verl's defaults were taken for what it sets; {_REMEDY}"
        return Base(unconverted=[("--config-name", name, why)])
    try:
        raw = parse(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        return Base(
            unconverted=[("--config-name", name, f"{file} cannot be read: {' '.join(str(error).split())}; {_REMEDY}")]
        )
    base = Base()
    for entry in raw.pop("defaults", []):
        if isinstance(entry, str) and entry in _OWN:
            base.values |= _OWN[entry]
        elif entry != "_self_":
            base.unconverted.append(
                (f"--config-name {name}", entry, f"an entry of its defaults list is not known; {_REMEDY}")
            )
    raw.pop("hydra", None)
    base.values |= {key: value for key, value in flat(raw) if not is_unset(key, value)}
    return base


def _found(name: str, folder: str | None, beside: Path | None) -> Path | None:
    if beside is None:
        return None
    places = [Path(folder or "config") / name, PurePosixPath("config") / name, PurePosixPath(name)]
    around = [beside.resolve().parent, *beside.resolve().parents]
    return next((where / place for where in around for place in places if (where / place).is_file()), None)


WHOLE = {
    "data.apply_chat_template_kwargs",
    "custom_reward_function.reward_kwargs",
    "reward.custom_reward_function.reward_kwargs",
}
"""Settings whose value is an object."""
# In a whole configuration these are what nobody has set.
_UNSET: tuple[Any, ...] = ("", [], {}, "???")
# verl's defaults that change nothing in what a run computes, where ours is faster.
_SLOWER_DEFAULTS = {"actor_rollout_ref.actor.checkpoint.async_save": False}


def flat(raw: dict[str, Any], prefix: str = "") -> Sequence[tuple[str, Any]]:
    """Return dotted names and values."""
    found: list[tuple[str, Any]] = []
    for key, value in raw.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and name not in WHOLE:
            found += flat(value, f"{name}.")
        else:
            found.append((name, value))
    return found


def folded(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings in which `section.key=value` of a setting that is an object has become part of the object."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        whole = next((section for section in WHOLE if name.startswith(f"{section}.")), None)
        if whole is None:
            found[name] = value
        else:
            known = found.get(whole)
            found[whole] = {**(known if isinstance(known, dict) else {}), name.removeprefix(f"{whole}."): value}
    return found


def is_unset(name: str, value: Any) -> bool:
    """Whether a value of a whole configuration is one that nobody has set."""
    is_interpolation = isinstance(value, str) and value.startswith("${")
    is_slower_default = name in _SLOWER_DEFAULTS and value == _SLOWER_DEFAULTS[name]
    return name.endswith("_target_") or is_interpolation or value is None or value in _UNSET or is_slower_default
