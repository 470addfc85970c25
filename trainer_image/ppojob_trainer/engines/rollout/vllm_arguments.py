"""Makes vLLM's arguments from a replica's options, and checks those that the user gives."""

from __future__ import annotations

from dataclasses import fields
from difflib import get_close_matches

import vllm
from vllm import AsyncEngineArgs

from ppojob_api.v1alpha1.engine_rules import SCHEDULING_ARGS
from ppojob_trainer.engines.errors import EngineArgumentError
from ppojob_trainer.engines.rollout.options import SCHEDULER, RolloutOptions, engine_arguments
from ppojob_trainer.engines.rollout.scheduler import is_supported


def checked_arguments(options: RolloutOptions) -> AsyncEngineArgs:
    """Return vLLM's arguments.

    Raises:
        EngineArgumentError: vLLM has no argument of a name in `rollout.engineArgs`, or refuses its value.
    """
    known = [field.name for field in fields(AsyncEngineArgs)]
    for name in options.engine_args:
        if name not in known:
            near = ", ".join(get_close_matches(name, known)) or "none of a similar name"
            raise EngineArgumentError(
                f"spec.rollout.engineArgs.{name}: vLLM {vllm.__version__} has no such argument (near: {near}); correct "
                "the name or leave it out"
            )
    arguments = engine_arguments(options)
    if is_supported(vllm.__version__) and not SCHEDULING_ARGS & options.engine_args.keys():
        arguments["scheduler_cls"] = SCHEDULER
    elif needing := [name for name, is_used in _needs_scheduler(options).items() if is_used]:
        raise EngineArgumentError(
            f"{needing[0]}: the trainer's scheduler does not know vLLM {vllm.__version__}; remove it, or use the "
            "image's vLLM"
        )
    try:
        return AsyncEngineArgs(**arguments)
    except (TypeError, ValueError) as error:
        raise EngineArgumentError(
            f"spec.rollout.engineArgs: vLLM refuses {dict(options.engine_args)}: {error}; correct the values"
        ) from error


def _needs_scheduler(options: RolloutOptions) -> dict[str, bool]:
    return {
        "spec.rollout.speculative": options.speculative is not None,
        "spec.schedule.weightUpdates: 'InFlight'": options.updates_in_flight,
        "spec.rollout.routingReplay": options.routing_replay,
    }
