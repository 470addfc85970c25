"""Measures each role once for equal work, in all plans that a command makes. Called by `cli`."""

from __future__ import annotations

from dataclasses import fields

from ppojob_trainer.planning.plan import Runner
from ppojob_trainer.planning.role_memory import measure
from ppojob_trainer.planning.work import Measured, Work

__all__ = ["measured_once"]


def measured_once(runner: Runner = measure) -> Runner:
    """Return a runner that calls `runner` once for equal work, and then returns the same numbers again."""
    known: dict[str, Measured] = {}

    def once(work: Work) -> Measured:
        # Before it runs: building a model may change its configuration.
        key = _key(work)
        if key not in known:
            known[key] = runner(work)
        return known[key]

    return once


def _key(work: Work) -> str:
    """Return a text that is the same for equal work: every field is in it."""
    values = {field.name: getattr(work, field.name) for field in fields(work)}
    values["config"] = work.config.to_json_string()
    if work.training is not None:
        # Work depends on the limit of tokens only by its numbers of sequences and micro-batches.
        values["training"] = work.training.model_copy(update={"max_tokens_per_gpu": None})
    return repr(values)
