"""Measures how far two computations of a mixture differ, with own choices of experts and with recorded ones.

    python -m tests.bench.bench_replay --output DIR [--layers 24] [--tokens 512]

A model with random weights computes the log-probs of random tokens twice in bfloat16. The second time, 2 % of its
embeddings' numbers are the next larger bfloat16 number, like different rounding. Its routers choose their own experts
or, as with `rollout.routingReplay`, those of the first computation. The table has the mean KL divergence of the second
computation from the first, in nats, the mean absolute difference of sampled tokens' log-probs, in nats, and the share
of experts that the second computation's own routers chose differently, in the first and in the last layer. On the CPU.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from ppojob_trainer.engines.train.fsdp.routing import prepare_routers, replay_experts, routers

HIDDEN: Final = 512
VOCABULARY: Final = 8192
LOGITS: Final = 5.0
"""Standard deviation of the logits, so that some tokens are far more probable than others."""
CHANGED: Final = 0.02
"""Share of the embeddings' numbers that the second computation has otherwise."""
_INITIAL: Final = 0.02
"""Standard deviation of transformers' initial weights."""
_OF_ALL: Final[dict[str, Any]] = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "tie_word_embeddings": False,
}
FAMILIES: Final[dict[str, dict[str, Any]]] = {
    "gpt_oss": {"intermediate_size": HIDDEN, "num_local_experts": 32, "num_experts_per_tok": 4},
    "mixtral": {"intermediate_size": 2 * HIDDEN, "num_local_experts": 8, "num_experts_per_tok": 2},
    "qwen3_moe": {"moe_intermediate_size": HIDDEN // 2, "num_experts": 128, "num_experts_per_tok": 8}
    | {"norm_topk_prob": True},
}
"""Experts as in the published models, but smaller."""


def main() -> None:
    """Measure, print, and write `replay.json`."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=512)
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = {family: measure(family, arguments.layers, arguments.tokens) for family in FAMILIES}
    Console(width=120).print(table(rows))
    (arguments.output / "replay.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


@torch.no_grad()
def measure(family: str, layers: int, tokens: int) -> dict[str, float]:
    """Return the figures of a family by the columns of the table."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(family, num_hidden_layers=layers, **_OF_ALL, **FAMILIES[family])
    model: Any = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    model.to(torch.bfloat16).eval()
    model.get_output_embeddings().weight *= LOGITS / (_INITIAL * HIDDEN**0.5)
    prepare_routers(model)
    chosen: dict[int, Tensor] = {}
    for layer, router in routers(model):
        router.register_forward_hook(partial(_note, chosen, layer))
    ids = torch.randint(VOCABULARY, (1, tokens))

    def computed() -> tuple[Tensor, Tensor]:
        """Return log-probs [tokens, vocabulary] and chosen experts [tokens, layers, experts of a token]."""
        log_p = model(ids).logits[0].float().log_softmax(-1)
        return log_p, torch.stack([chosen[layer] for layer in range(layers)], dim=1)

    first, recorded = computed()
    embeddings = model.get_input_embeddings().weight
    next_numbers = (embeddings.float() * (1 + 2.0**-7)).bfloat16()
    embeddings.copy_(torch.where(torch.rand(embeddings.shape) < CHANGED, next_numbers, embeddings))
    own, choices = computed()
    replay_experts(model.base_model, recorded.flatten(1))
    replayed, _ = computed()
    sampled = torch.multinomial(first.exp(), 1)
    differ = (choices.unsqueeze(-1) != recorded.unsqueeze(-2)).all(-1).float().mean((0, 2))
    found = {"first layer": float(differ[0]), "last layer": float(differ[-1])}
    for name, second in (("own choices", own), ("replayed", replayed)):
        found[f"KL, {name}"] = float((first.exp() * (first - second)).sum(-1).mean())
        found[f"log-probs, {name}"] = float((first - second).gather(1, sampled).abs().mean())
    return found


def table(rows: dict[str, dict[str, float]]) -> Table:
    """Return a row for each family."""
    shown = Table(title="differences in nats, and shares of other choices")
    shown.add_column("family")
    for column in next(iter(rows.values())):
        shown.add_column(column, justify="right")
    for family, row in rows.items():
        shown.add_row(family, *(f"{value:.4f}" for value in row.values()))
    return shown


def _note(chosen: dict[int, Tensor], layer: int, _: nn.Module, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> None:
    chosen[layer] = output[2].long()


if __name__ == "__main__":
    main()
