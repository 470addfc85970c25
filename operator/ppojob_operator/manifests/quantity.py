"""Arithmetic on Kubernetes quantities: a pod requests a multiple of what each of its GPUs needs."""

from decimal import Decimal


def times(quantity: str, factor: int) -> str:
    """Return a quantity multiplied, in its own unit: 3 x "1.5Gi" is "4.5Gi", 2 x "300m" is "600m"."""
    number = quantity.rstrip("mkMGTPi")
    product = Decimal(number) * factor
    return f"{_plain(product)}{quantity[len(number) :]}"


def _plain(number: Decimal) -> str:
    """Return a decimal without exponent and without trailing zeros."""
    whole = number.to_integral_value()
    return str(whole) if number == whole else f"{number.normalize():f}"
