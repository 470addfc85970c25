"""Kubernetes quantities."""

from decimal import Decimal

import pytest
from pydantic import TypeAdapter, ValidationError

from ppojob_api.v1alpha1.quantities import Quantity, parse_quantity


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("8", "8"),
        ("0.5", "0.5"),
        ("500m", "0.5"),
        ("1k", "1000"),
        ("2M", "2000000"),
        ("1Ki", "1024"),
        ("64Gi", str(64 * 1024**3)),
        ("1.5Gi", str(1.5 * 1024**3)),
        ("1Ti", str(1024**4)),
        ("1Pi", str(1024**5)),
        ("3G", "3000000000"),
    ],
)
def test_a_quantity_is_a_number(text: str, number: str) -> None:
    assert parse_quantity(text) == Decimal(number)


@pytest.mark.parametrize("text", ["", "8 Gi", "Gi", "-1", "1e3", "8GiB", "eight", "1.", ".5"])
def test_what_is_no_quantity_is_refused_with_examples(text: str) -> None:
    with pytest.raises(ValueError, match="such as 8, 500m or 64Gi"):
        parse_quantity(text)


@pytest.mark.parametrize(("given", "kept"), [("64Gi", "64Gi"), (8, "8"), (0.5, "0.5")])
def test_a_quantity_may_be_written_as_a_number(given: object, kept: str) -> None:
    assert TypeAdapter(Quantity).validate_python(given) == kept


@pytest.mark.parametrize("given", ["64 Gi", "9" * 33, None, -1])
def test_a_field_refuses_what_is_no_quantity(given: object) -> None:
    with pytest.raises(ValidationError):
        TypeAdapter(Quantity).validate_python(given)
