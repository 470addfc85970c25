"""Types that several sections share: Kubernetes names, quantities, key-value maps, raw Kubernetes objects."""

import re
from decimal import Decimal
from typing import Annotated, Any

from pydantic import Field, WithJsonSchema

from ppojob_api.v1alpha1.spelling import spelled

_FACTORS: dict[str, Decimal] = {
    "": Decimal(1),
    "m": Decimal("0.001"),
    **{suffix: Decimal(1000) ** power for power, suffix in enumerate("kMGTP", start=1)},
    **{f"{suffix}i": Decimal(1024) ** power for power, suffix in enumerate("KMGTP", start=1)},
}
_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$"

Quantity = Annotated[
    str,
    spelled(
        _QUANTITY,
        "must be a quantity such as 8, 500m or 64Gi: a number, and a suffix of m, k, M, G, T, P, Ki, Mi, Gi, Ti or Pi",
        max_length=32,
        coerce_numbers_to_str=True,
    ),
    # The pattern bounds text only; a number has its own bound.
    WithJsonSchema({"x-kubernetes-int-or-string": True, "pattern": _QUANTITY, "minimum": 0}),
]
"""A Kubernetes quantity: `8`, `500m`, `64Gi`; like everywhere in Kubernetes, 8 may be written as a number."""

DNSLabel = Annotated[
    str,
    spelled(
        r"^[a-z]([-a-z0-9]*[a-z0-9])?$",
        "must have lower-case letters, digits and '-' only, and begin with a letter and not end with '-'",
        min_length=1,
        max_length=40,
    ),
]
"""A DNS label that begins with a letter."""

ObjectName = Annotated[
    str,
    spelled(
        r"^[a-z0-9]([-.a-z0-9]*[a-z0-9])?$",
        "must be the name of an object: lower-case letters, digits, '-' and '.', with a letter or digit at both ends",
        min_length=1,
        max_length=253,
    ),
]
"""Name of another object in the job's namespace."""

NodeLabel = Annotated[
    str,
    spelled(
        r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-_.A-Za-z0-9]*[A-Za-z0-9])?$",
        "must be the key of a label of nodes, such as kubernetes.io/hostname",
        min_length=1,
        max_length=317,
    ),
]
"""Key of a node's label."""

Text = Annotated[str, Field(max_length=1024)]
ShortText = Annotated[str, Field(max_length=253)]
Path = Annotated[
    str,
    spelled(r"^[^\x00-\x1f\x7f]+$", "must have no control characters: remove them", min_length=1, max_length=4096),
]
"""A path or an address: any characters but control characters."""
StringMap = Annotated[dict[str, Annotated[str, Field(max_length=1024)]], Field(max_length=64)]


# Atomic: server-side apply that removes fields one by one leaves null in place of the object, which is no object.
_RAW = {"type": "object", "x-kubernetes-map-type": "atomic", "x-kubernetes-preserve-unknown-fields": True}

RawObject = Annotated[dict[str, Any], WithJsonSchema(_RAW)]
"""An object of a Kubernetes API, passed through as it is."""

RawObjects = Annotated[list[RawObject], Field(max_length=64)]


def parse_quantity(value: str) -> Decimal:
    """Return the number that a Kubernetes quantity stands for: `500m` is 0.5, `1Ki` is 1024.

    Raises:
        ValueError: the text is not a quantity.
    """
    if not re.match(_QUANTITY, value):
        raise ValueError(
            f"{value!r} is not a Kubernetes quantity: write a number with an optional unit suffix, such as 8, "
            "500m or 64Gi"
        )
    number = value.rstrip("mkKMGTPi")
    return Decimal(number) * _FACTORS[value[len(number) :]]
