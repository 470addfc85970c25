"""The version of this package, and which versions of operator and trainer work together.

`JobFile.decode` and the operator's intake of reports call `unsupported_pair`.
"""

import re
from importlib.metadata import version

MAX_MINOR_VERSIONS_APART = 1
"""How far operator and trainer may be apart, in both directions (docs/api-policy.md)."""
_MINOR = re.compile(r"(?P<major>\d+)\.(?P<minor>\d+)\b")
_PRE_RELEASE = re.compile(r"\.?(dev|rc)(\d+)$")


def own_version() -> str:
    """Return the version of this package as chart and images have it.

    Python's metadata may spell versions of development and release candidates in another way: builders differ.
    """
    return semantic_version(version("ppojob"))


def semantic_version(installed: str) -> str:
    """Return a version of Python's metadata as semantic versioning and pyproject.toml spell it.

    0.3.0.dev0 and 0.3.0-dev -> 0.3.0-dev, 0.3.0rc1 -> 0.3.0-rc.1, 0.3.0 -> 0.3.0.
    """
    return _PRE_RELEASE.sub(r"-\1.\2", installed).removesuffix(".0") if _PRE_RELEASE.search(installed) else installed


def unsupported_pair(operator: str, trainer: str) -> str | None:
    """Return what is wrong if these versions do not work together, with both of them; None if they do.

    A version that is no number, such as one of a fork, is not judged.
    """
    of_operator, of_trainer = _MINOR.match(operator), _MINOR.match(trainer)
    if of_operator is None or of_trainer is None:
        return None
    apart = abs(int(of_operator["minor"]) - int(of_trainer["minor"]))
    if of_operator["major"] == of_trainer["major"] and apart <= MAX_MINOR_VERSIONS_APART:
        return None
    return (
        f"the operator has version {operator} and the trainer {trainer}: they may differ by one minor version; use a "
        "trainer image of the operator's version"
    )
