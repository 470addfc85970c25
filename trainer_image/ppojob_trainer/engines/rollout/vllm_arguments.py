"""Makes vLLM's arguments from a replica's options, checks those that the user gives, and prepares the process."""

from __future__ import annotations

import math
import os
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Final

import vllm
from vllm import AsyncEngineArgs

from ppojob_api.v1alpha1.engine_rules import SCHEDULING_ARGS
from ppojob_trainer.engines.errors import EngineArgumentError
from ppojob_trainer.engines.rollout.engine_nodes import EngineNode
from ppojob_trainer.engines.rollout.options import (
    AGENT_STORE,
    HOST_ADDRESS,
    SCHEDULER,
    RolloutOptions,
    engine_arguments,
)

SCHEDULED: Final = ("0.32.",)
"""Prefixes of vLLM's versions whose scheduler has the fields and methods that `ResponseScheduler` uses."""


def prepare_process(address: str | None = None) -> None:
    """Set what vLLM's processes, which this one starts, read from the environment.

    Args:
        address: under which the other nodes of the engine reach this one, if there are any.
    """
    # Inductor moves Triton's kernel folder when it compiles, but not when it loads cached code. vLLM would then look
    # for its kernels in the wrong folder and compile them again, which takes ten seconds.
    os.environ.setdefault("TRITON_CACHE_DIR", str(Path.home() / ".triton" / "cache"))
    if address is not None:
        os.environ[HOST_ADDRESS] = address
        # The engine's first node has opened the store in which the workers meet. Without it, worker 0 would open one.
        os.environ[AGENT_STORE] = "True"


def checked_arguments(options: RolloutOptions, node: EngineNode | None = None) -> AsyncEngineArgs:
    """Return vLLM's arguments; `node`: this one, of an engine of several nodes.

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
    if node is not None:
        arguments |= {"nnodes": node.number, "node_rank": node.index}
        arguments |= {"master_addr": node.address, "master_port": node.port}
        # vLLM's own would be 10 and 30 minutes, and nodes may need different times to read a model.
        limit = math.ceil(options.timeout_seconds)
        arguments |= {"distributed_timeout_seconds": limit, "cpu_distributed_timeout_seconds": limit}
        # vLLM's kernel is for one host. It recognizes a host by shared memory alone, so with two nodes on one host it
        # looks for the GPUs of both in CUDA_VISIBLE_DEVICES, and fails. With NVLink between hosts, it needs multicast.
        if options.tensor_parallel_size * node.number > options.num_workers:
            arguments["disable_custom_all_reduce"] = True
    if vllm.__version__.startswith(SCHEDULED) and not SCHEDULING_ARGS & options.engine_args.keys():
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
