"""The experts that vLLM's routers chose for each token, which `rollout.routingReplay` hands to the trainer.

vLLM 0.32 returns them from its second model runner (`enable_return_routed_experts`). Its first one, which computes on
the CPU, has no such output. There, `record_experts` connects vLLM's own recorder to it: the same hooks in the routers,
the same store for prompts whose prefix is cached, and the same part of the scheduler (`scheduler`). Called by
`WeightReceiverExtension`. It refuses asynchronous scheduling, with which the first runner returns no plain output.
"""

from __future__ import annotations

from types import MethodType, SimpleNamespace
from typing import Any

import numpy as np
from vllm.distributed.aux_output_connector.worker import AuxOutputWorkerConnector

__all__ = ["record_experts"]


def record_experts(model_runner: Any) -> None:
    """Have vLLM's first model runner return the experts of each step, in `aux_output_connector_output`.

    Raises:
        ValueError: vLLM cannot record the experts of this model, or it schedules asynchronously.
    """
    if model_runner.use_async_scheduling:
        raise ValueError("the experts of asynchronous steps cannot be recorded: remove async_scheduling")
    recorder = AuxOutputWorkerConnector(
        vllm_config=model_runner.vllm_config,
        model=model_runner.get_model(),
        kv_cache_config=model_runner.kv_cache_config,
    )
    execute, sample = model_runner.execute_model, model_runner.sample_tokens

    def execute_model(runner: Any, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        recorder.begin_step(scheduler_output.aux_output_connector_metadata)
        return execute(scheduler_output, *args, **kwargs)

    def sample_tokens(runner: Any, *args: Any, **kwargs: Any) -> Any:
        step = _step_of(runner)
        output = sample(*args, **kwargs)
        pending = recorder.prepare_output(step)
        if pending is not None:
            sampled = np.array([len(tokens) for tokens in output.sampled_token_ids])
            # No draft is ever refused: `rollout.speculative` is refused with routing replay.
            pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
            output.aux_output_connector_output = pending.process_output()
        return output

    model_runner.execute_model = MethodType(execute_model, model_runner)
    model_runner.sample_tokens = MethodType(sample_tokens, model_runner)


def _step_of(runner: Any) -> Any:
    """Return what the recorder reads of a step: its requests, and the first row and the first position of each."""
    batch = runner.input_batch
    names = list(batch.req_ids)
    return SimpleNamespace(
        req_ids=names,
        query_start_loc_np=runner.query_start_loc.np[: len(names) + 1].copy(),
        num_computed_tokens_np=batch.num_computed_tokens_cpu[: len(names)].copy(),
    )
