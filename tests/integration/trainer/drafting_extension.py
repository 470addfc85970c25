"""What a test's worker of vLLM does in addition: for the choice of drafts, all steps take the same time.

So the choice depends on no machine, and a step with drafts is the faster one wherever a draft was right. vLLM's process
imports it by its name, before it makes the scheduler, which is in the same process.
"""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any, cast

from ppojob_trainer.engines.rollout import scheduler
from ppojob_trainer.engines.rollout.drafting import DraftingChoice
from ppojob_trainer.engines.rollout.worker_extension import WeightReceiverExtension

cast("Any", scheduler).DraftingChoice = partial(DraftingChoice, clock=itertools.count().__next__)


class EqualStepsExtension(WeightReceiverExtension):
    """See the module's docstring."""
