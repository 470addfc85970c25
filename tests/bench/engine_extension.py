"""vLLM's worker with switches for measurements. `variants` gives vLLM its name; `generation` calls it.

With the executor of one GPU, the worker is in the process and thread of vLLM's scheduler. So what is set here holds for
both, and the profile has both.
"""

from __future__ import annotations

import cProfile
import gc
import io
import pstats
from typing import Any

from ppojob_trainer.engines.rollout.drafting import DraftingChoice
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension


class MeasuringExtension(WeightReceiverExtension):
    """See the module's docstring."""

    def ppojob_draft_always(self) -> None:
        """Let every step have drafts that the engine's arguments allow."""
        _choose(lambda _, number: True)

    def ppojob_draft_never(self) -> None:
        """Let no step have drafts."""
        _choose(lambda _, number: False)

    def ppojob_stop_collector(self) -> None:
        """Switch the garbage collector off."""
        gc.collect()
        gc.disable()

    def ppojob_begin_profile(self) -> None:
        """Profile this thread from now on."""
        self.ppojob_profile = cProfile.Profile()
        self.ppojob_profile.enable()

    def ppojob_end_profile(self, num_rows: int) -> str:
        """Return where this thread spent its time, by the time in each function itself and in total."""
        self.ppojob_profile.disable()
        text = io.StringIO()
        found = pstats.Stats(self.ppojob_profile, stream=text)
        for order in ("tottime", "cumulative"):
            found.sort_stats(order).print_stats(num_rows)
        return text.getvalue()


def _choose(choice: Any) -> None:
    # The scheduler in this process asks the class.
    DraftingChoice.wants_drafts = choice  # type: ignore[method-assign]
