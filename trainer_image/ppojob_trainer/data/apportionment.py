"""Which source of a mixture the next prompt comes from, by the weights alone. Pure; called by `loader`.

After every prompt, each source has given its share of all prompts up to less than one prompt. Largest deficit, which is
simpler, does not promise that: with 16 sources, one may be 1.3 prompts behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction


class Apportionment:
    """The quota method (Balinski and Young 1975, "The quota method of apportionment").

    Of the sources that have given less than their share of the prompts with the next one, it chooses the one whose
    next prompt is due first. It counts in integers, so the choice is the same on every machine.
    """

    def __init__(self, weights: Sequence[float]) -> None:
        """
        Args:
            weights: of the sources, positive, relative to each other.
        """
        # The shortest decimal of a weight is what the user wrote: 0.1 is a tenth.
        exact = [Fraction(repr(weight)) for weight in weights]
        scale = math.lcm(*(weight.denominator for weight in exact))
        self._weights = [int(weight * scale) for weight in exact]
        self._sum = sum(self._weights)
        longest = math.lcm(*self._weights)
        self._periods = [longest // weight for weight in self._weights]

    def next_source(self, drawn: Sequence[int]) -> int:
        """Return the number of the source of the next prompt; of equal ones, the first.

        Args:
            drawn: prompts that each source has given, in the order of this method.
        """
        count = sum(drawn) + 1
        behind = [
            number
            for number, (weight, given) in enumerate(zip(self._weights, drawn, strict=True))
            if given * self._sum < weight * count
        ]
        return min(behind, key=lambda number: (drawn[number] + 1) * self._periods[number])
