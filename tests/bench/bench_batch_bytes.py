"""The bytes of a step's batch between processes: without padding and by declared columns, beside padded tensors.

    python -m tests.bench.bench_batch_bytes --prompts 256 --samples 16 --prompt-length 1024 --response-length 16384

Lengths are drawn at random. The sizes are those of the columns that `store_rows` would store and of those that each
method declares, of a PPO step with a critic and KL in the reward. The padded layout, which the trainer had before, is
here only: int64 tokens and masks, as wide as the longest allowed prompt and response, and all columns for each method.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import torch

from ppojob_api.v1alpha1.algorithm import KL, AlgorithmSpec
from ppojob_trainer.protocol import FIELDS, DataProto, Keys, Ragged
from ppojob_trainer.protocol.wire import num_bytes
from ppojob_trainer.worker_groups.advantages import AdvantageSettings, unread_by_advantages
from ppojob_trainer.worker_groups.dispatch import RemoteMethod
from ppojob_trainer.worker_groups.roles.actor import ActorWorker, unread_by_update
from ppojob_trainer.worker_groups.roles.critic import CriticWorker
from ppojob_trainer.worker_groups.roles.ref import RefWorker
from ppojob_trainer.worker_groups.roles.reward import RewardWorker

_OF_ROLLOUT: Final = (Keys.INPUT_IDS, Keys.RESPONSE_MASK, Keys.ROLLOUT_LOG_PROBS)
_BEFORE_ADVANTAGES: Final = (Keys.TOKEN_LEVEL_SCORES, Keys.OLD_LOG_PROBS, Keys.VALUES, Keys.REF_LOG_PROB)
_OF_ADVANTAGES: Final = (Keys.ADVANTAGES, Keys.RETURNS)
_ALGORITHM: Final = AlgorithmSpec(kl=KL(in_reward=True))


@dataclass(frozen=True)
class Sizes:
    """Bytes of a phase: those that all ranks fetch, once for each row, and those that they store."""

    phase: str
    padded: int
    ragged: int


@dataclass(frozen=True)
class _Phase:
    """name, method, what the batch has before it, what the method returns, and what a job does not send to it."""

    name: str
    method: RemoteMethod[..., ..., ..., ..., ...]
    has: tuple[str, ...]
    returns: tuple[str, ...]
    unread: frozenset[str] = frozenset()


_ALL: Final = (*_OF_ROLLOUT, *_BEFORE_ADVANTAGES)
_PHASES: Final = (
    _Phase("reward", RewardWorker.compute_scores, _OF_ROLLOUT, (Keys.TOKEN_LEVEL_SCORES,)),
    _Phase("old_log_prob", ActorWorker.compute_log_prob, _OF_ROLLOUT, (Keys.OLD_LOG_PROBS,)),
    _Phase("values", CriticWorker.compute_values, _OF_ROLLOUT, (Keys.VALUES,)),
    _Phase("ref", RefWorker.compute_ref_log_prob, _OF_ROLLOUT, (Keys.REF_LOG_PROB,)),
    _Phase(
        "adv",
        CriticWorker.compute_advantages,
        _ALL,
        _OF_ADVANTAGES,
        unread_by_advantages(AdvantageSettings(_ALGORITHM, 1)),
    ),
    _Phase("update_critic", CriticWorker.update_critic, (*_ALL, *_OF_ADVANTAGES), ()),
    _Phase("update_actor", ActorWorker.update_actor, (*_ALL, *_OF_ADVANTAGES), (), unread_by_update(_ALGORITHM)),
)


def lengths(number: int, longest: int, generator: torch.Generator) -> torch.Tensor:
    """Return lengths of 1 to `longest` tokens: log-normal around an eighth, so that a few are cut off."""
    drawn = torch.randn(number, generator=generator).exp() * longest / 8
    return drawn.long().clamp(1, longest)


def batch_of(prompts: torch.Tensor, responses: torch.Tensor) -> DataProto:
    """Return a batch with all columns that have a value for each token, those of a model without experts."""
    of_tokens = {"prompt": prompts, "sequence": prompts + responses, "response": responses}
    return DataProto.from_dict(
        {
            name: Ragged(torch.zeros(int(of_tokens[field.tokens].sum()), dtype=field.dtype), of_tokens[field.tokens])
            for name, field in FIELDS.items()
            if name != Keys.ROUTED_EXPERTS
        }
    )


def measured(batch: DataProto, prompt_length: int, response_length: int) -> list[Sizes]:
    """Return the sizes of each phase, and of the whole step."""
    rows, sequence = len(batch), prompt_length + response_length
    tokens = {"prompts": prompt_length, "responses": response_length, "input_ids": sequence}
    masks = {"attention_mask": sequence, "position_ids": sequence, "response_mask": response_length}
    rollout = sum(8 * rows * width for width in {**tokens, **masks}.values()) + 4 * rows * response_length
    floats = 4 * rows * response_length

    def padded(columns: Iterable[str]) -> int:
        return floats * len(set(columns) - set(_OF_ROLLOUT)) + (rollout if Keys.INPUT_IDS in columns else 0)

    def ragged(columns: Iterable[str]) -> int:
        return sum(num_bytes(batch.ragged(name)) for name in columns)

    found = [Sizes("gen", rollout, ragged((*_OF_ROLLOUT, Keys.PROMPT_IDS)))]
    for phase in _PHASES:
        assert phase.method.reads is not None
        fetched = [name for name in phase.has if name in phase.method.reads - phase.unread]
        found.append(
            Sizes(phase.name, padded(phase.has) + padded(phase.returns), ragged(fetched) + ragged(phase.returns))
        )
    return [*found, Sizes("step", sum(one.padded for one in found), sum(one.ragged for one in found))]


def table(sizes: Sequence[Sizes]) -> str:
    """Return the sizes as text."""
    lines = [f"{'phase':<14}{'padded MB':>12}{'ragged MB':>12}{'ratio':>8}"]
    for one in sizes:
        lines.append(
            f"{one.phase:<14}{one.padded / 1e6:>12.0f}{one.ragged / 1e6:>12.0f}{one.padded / one.ragged:>8.1f}"
        )
    return "\n".join(lines)


def main(arguments: Mapping[str, int]) -> list[Sizes]:
    """Measure one batch, and print the table."""
    generator = torch.Generator().manual_seed(0)
    # All samples of a prompt have the same prompt.
    prompts = lengths(arguments["prompts"], arguments["prompt_length"], generator)
    responses = lengths(arguments["prompts"] * arguments["samples"], arguments["response_length"], generator)
    batch = batch_of(prompts.repeat_interleave(arguments["samples"]), responses)
    sizes = measured(batch, arguments["prompt_length"], arguments["response_length"])
    content = float(batch.ragged(Keys.INPUT_IDS).lengths.float().mean())
    print(f"{len(batch)} sequences of {content:.0f} tokens on average")
    print(table(sizes))
    return sizes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for option, default in (("prompts", 256), ("samples", 16), ("prompt-length", 1024), ("response-length", 16_384)):
        parser.add_argument(f"--{option}", type=int, default=default)
    main(vars(parser.parse_args()))
