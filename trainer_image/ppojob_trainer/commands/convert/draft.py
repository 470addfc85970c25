"""What the functions of `parts` have converted, and verl's settings that are left."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

MOUNT = "/data"
_HOME = re.compile(r"^(~|\$HOME|\$\{HOME\})/")


@dataclass
class Draft:
    """A PPOJob that is being written. `given` shrinks as settings are understood."""

    given: dict[str, Any]
    values: dict[str, Any] = field(default_factory=dict)
    """Fields by their dotted paths below spec."""
    to_fill: list[tuple[str, str]] = field(default_factory=list)
    """Path of a field, and what the user must see to."""
    unconverted: list[tuple[str, Any, str]] = field(default_factory=list)
    """Setting, value, and why it is not converted."""
    name: str = "from-verl"
    splits: bool = False
    """Half of the GPUs are the actor's, half the critic's."""
    is_one_step_off: bool = False
    """Responses come from the weights of one step before."""

    def take(self, *names: str, default: Any = None) -> Any:
        """Take settings of the same meaning out; return the first one that says something."""
        found = [self.given.pop(name, None) for name in names]
        return next((value for value in found if value is not None), default)

    def path(self, target: str, value: object) -> str:
        """Return a path as the container sees it, and ask the user to put something there."""
        text = str(value)
        moved = _HOME.sub(f"{MOUNT}/", text).replace(f"{MOUNT}{MOUNT}/", f"{MOUNT}/", 1)
        if "://" in moved:
            moved = f"{MOUNT}/{moved.rsplit('/', 1)[-1]}"
        elif not moved.startswith("/"):
            moved = f"{MOUNT}/{moved.removeprefix('./')}"
        if moved != text or not moved.startswith(f"{MOUNT}/"):
            self.to_fill.append((target, f"verl read {text}: the pods must find it at {moved}, or give another path"))
        return moved
