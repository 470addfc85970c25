"""Metrics that are computed from lengths, counts and times alone, under verl's names. Pure; the controller calls it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from ppojob_trainer.controller.ports import Batch, Drafts, Rollout

__all__ = ["draft_metrics", "length_metrics", "staleness_metrics", "throughput_metrics"]

B = TypeVar("B", bound=Batch)

# As in verl: these are divided by the response tokens, the others by all tokens.
_BY_RESPONSE_TOKENS = ("gen",)


def length_metrics(rollout: Rollout[B], max_response_length: int) -> dict[str, float]:
    """Return the lengths of prompts, responses and sequences, in tokens, and the share of truncated responses."""
    responses = rollout.response_lengths
    totals = [prompt + response for prompt, response in zip(rollout.prompt_lengths, responses, strict=True)]
    cut = sum(length >= max_response_length for length in responses)
    return {
        **_spread("response_length", responses),
        "response_length/clip_ratio": cut / len(responses),
        **_spread("prompt_length", rollout.prompt_lengths),
        **_spread("global_seqlen", totals),
        "perf/total_num_tokens": float(sum(totals)),
    }


def staleness_metrics(step: int, version: int, rollout: Rollout[B]) -> dict[str, float]:
    """Return how old the weights are that generated the responses of a step.

    staleness/max, staleness/mean: steps of the run between the weights with which a response begins and the ones that
    are trained; 0: on-policy. staleness/oldest_version: the step after which the policy had the oldest weights of all.
    If weights are updated in flight: staleness/mixed_samples_fraction: share of the responses whose tokens come from
    more than one version; staleness/newer_tokens_fraction: share of the response tokens that newer weights sampled than
    the first token of their response. Otherwise all responses of a step have the same version.

    Args:
        version: with which their generation began.
    """
    newer = rollout.newer_tokens
    # Equal weights are not sent again, so an engine's version may be lower than that of the step.
    oldest = [max(version, each) for each in rollout.oldest_versions] if newer else [version]
    metrics = {
        "staleness/max": float(step - 1 - min(oldest)),
        "staleness/mean": step - 1 - sum(oldest) / len(oldest),
        "staleness/oldest_version": float(min(oldest)),
    }
    if newer:
        metrics["staleness/mixed_samples_fraction"] = sum(count > 0 for count in newer) / len(newer)
        metrics["staleness/newer_tokens_fraction"] = sum(newer) / max(1, sum(rollout.response_lengths))
    return metrics


def draft_metrics(drafts: Sequence[Drafts]) -> dict[str, float]:
    """Return what drafts were worth, of all engines; nothing without `rollout.speculative`.

    rollout/accepted_tokens_per_draft: drafted tokens that a response took over, for each of its steps that checked
    drafts. rollout/speculative_steps_fraction: the share of such steps.
    """
    num_steps = sum(part.num_steps for part in drafts)
    if not num_steps:
        return {}
    num_drafted, num_accepted = sum(part.num_drafted for part in drafts), sum(part.num_accepted for part in drafts)
    return {
        "rollout/accepted_tokens_per_draft": num_accepted / max(1, num_drafted),
        "rollout/speculative_steps_fraction": num_drafted / num_steps,
    }


def throughput_metrics(metrics: dict[str, float], step_seconds: float, num_gpus: int) -> dict[str, float]:
    """Return the rates of a step.

    Args:
        metrics: of the step, with lengths and `timing_s/*`.
        num_gpus: of all pools.

    Returns:
        perf/throughput in tokens / (s x GPU), perf/time_per_step in s, timing_per_token_ms/* in ms.
    """
    tokens = metrics["perf/total_num_tokens"]
    rows = tokens / metrics["global_seqlen/mean"]
    response_tokens = metrics["response_length/mean"] * rows
    rates = {
        "timing_s/step": step_seconds,
        "perf/time_per_step": step_seconds,
        "perf/throughput": tokens / (max(step_seconds, 1e-9) * num_gpus),
    }
    for name, seconds in metrics.items():
        phase = name.removeprefix("timing_s/")
        if phase != name:
            divisor = response_tokens if phase in _BY_RESPONSE_TOKENS else tokens
            rates[f"timing_per_token_ms/{phase}"] = 1000 * seconds / max(divisor, 1.0)
    return rates


def _spread(name: str, lengths: Sequence[int]) -> dict[str, float]:
    return {
        f"{name}/mean": sum(lengths) / len(lengths),
        f"{name}/max": float(max(lengths)),
        f"{name}/min": float(min(lengths)),
    }
