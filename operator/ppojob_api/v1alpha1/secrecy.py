"""Where a job's secrets are: what of a spec may be shown to others, and which values its output must not repeat.

The trainer calls it, for the services that its metrics go to and for its log, whose end the operator puts into the
status. It knows names and sources, not values: a secret that somebody wrote into an address is not found.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from ppojob_api.v1alpha1.spec import PPOJobSpec

MIN_SECRET_LENGTH = 6
"""A value of fewer characters is not looked for: it would be found in words that have nothing to do with it."""

_WORDS = ("TOKEN", "KEY", "SECRET", "PASSWORD")
_ENVIRONMENTS = {"env", "envFrom", "podTemplate"}
_FREE = {"kwargs", "config", "chatTemplateKwargs"}
"""Objects whose fields users name."""
_OPEN_SOURCES = {"configMapKeyRef", "fieldRef", "resourceFieldRef"}
LEFT_OUT = "(left out)"


def looks_secret(name: str) -> bool:
    """Return whether the name of a variable or an argument says that its value is a secret."""
    return any(word in name.upper() for word in _WORDS)


def shown(spec: PPOJobSpec) -> dict[str, Any]:
    """Return the JSON form of a spec without environments, pod templates and arguments that are named like secrets."""
    wire: dict[str, Any] = _shown(spec.to_wire(), is_free=False)
    return wire


def secret_values(spec: PPOJobSpec, environ: Mapping[str, str]) -> list[str]:
    """Return the secrets among a process's variables and in the spec: by their source, or by their names.

    Which variables `envFrom` brings in from a Secret is known by its prefix alone; without one, the names decide.
    """
    variables = list(_variables(spec.to_wire()))
    from_secrets = {each["name"] for each in variables if _is_from_secret(each)}
    prefixes = tuple(each["prefix"] for each in spec.env_from if "secretRef" in each and each.get("prefix"))
    found = {
        value
        for name, value in environ.items()
        if looks_secret(name) or name in from_secrets or name.startswith(prefixes)
    }
    found |= {str(each["value"]) for each in variables if each.get("value") and looks_secret(each["name"])}
    return sorted(value for value in found if len(value) >= MIN_SECRET_LENGTH)


def _shown(value: Any, *, is_free: bool) -> Any:
    if isinstance(value, list):
        return [_shown(item, is_free=is_free) for item in value]
    if not isinstance(value, Mapping):
        return value
    return {
        name: LEFT_OUT
        if is_free and isinstance(item, str) and looks_secret(name)
        else _shown(item, is_free=is_free or name in _FREE)
        for name, item in value.items()
        if is_free or name not in _ENVIRONMENTS
    }


def _variables(value: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the variables in a spec, wherever there are some: its own, and those of pod templates."""
    if isinstance(value, list):
        for item in value:
            yield from _variables(item)
    elif isinstance(value, Mapping):
        for name, item in value.items():
            if name == "env" and isinstance(item, list):
                yield from (each for each in item if isinstance(each, Mapping) and "name" in each)
            else:
                yield from _variables(item)


def _is_from_secret(variable: Mapping[str, Any]) -> bool:
    source = variable.get("valueFrom")
    return isinstance(source, Mapping) and not set(source) <= _OPEN_SOURCES
