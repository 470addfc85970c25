"""The reward model: a frozen sequence classifier that gives a score for each sequence. One rank's part, in one process.

`ScoringEngine` for the reward model's role; `engines.train.loader` creates it. It runs the checkpoint's own forward
pass in transformers on padded micro-batches of similar length, so decoders and encoders both work, and a score is what
`AutoModelForSequenceClassification` gives for the sequence alone. The weights are bfloat16 and sharded by layers; a
linear head computes in float32, because scores are compared by small differences. `score` is collective: every rank
calls it with its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from transformers import AutoModelForSequenceClassification, PretrainedConfig, PreTrainedModel

from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.engines.train.fsdp.loading import (
    Conversions,
    allocate,
    load_weights,
    open_weights,
    without_memory,
)
from ppojob_trainer.engines.train.fsdp.model import LoadOptions
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import read_config

__all__ = ["RewardModelEngine", "build_reward_model", "check_reward_model", "padded_parts"]

_AUTO_CLASS = "AutoModelForSequenceClassification"


class RewardModelEngine:
    """The frozen reward model."""

    def __init__(
        self,
        parallel: ParallelMesh,
        path: str,
        *,
        label: int = 0,
        trust_remote_code: bool = False,
        max_tokens_per_gpu: int,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """Load and shard the model. Collective.

        Args:
            label: number of the label whose logit is the score.
            max_tokens_per_gpu: of one forward pass, padding included; a longer sequence runs alone.
            dtype: of weights and computation but for the head; float32 is for tests that compare small numbers.

        Raises:
            ModelNotFoundError, ModelUnsupportedError: see `check_reward_model`; or the weights cannot be read.
        """
        options = LoadOptions(trust_remote_code, dtype=dtype)
        self.parallel = parallel
        self.model = _load(path, check_reward_model(path, label, trust_remote_code), options, parallel)
        self._label = label
        self._max_tokens = max_tokens_per_gpu
        self._text_config: Any = cast(Any, self.model).config.get_text_config()
        self._pad_token: int | None = self._text_config.pad_token_id

    @torch.no_grad()
    def score(self, token_lists: Sequence[Sequence[int]]) -> Tensor:
        """Return the score of each sequence, float32 [B] on the CPU. Collective; at least one sequence."""
        parts = padded_parts([len(tokens) for tokens in token_lists], self._max_tokens)
        most = int(self.parallel.max(torch.tensor([len(parts)])).item())
        found: list[tuple[list[int], Tensor]] = []
        for number in range(most):
            # A rank that is done repeats its last part, because the others need its shards.
            rows = parts[min(number, len(parts) - 1)]
            found.append((rows, self._logits([token_lists[row] for row in rows])))
        scores = torch.zeros(len(token_lists))
        for rows, logits in found:
            scores[rows] = logits[:, self._label].float().cpu()
        cast(FSDPModule, self.model).reshard()
        return scores

    def destroy(self) -> None:
        """Leave the process group."""
        self.parallel.destroy()

    def _logits(self, rows: Sequence[Sequence[int]]) -> Tensor:
        width = max(map(len, rows))
        pad = self._pad_token if self._pad_token is not None else self._unused_token(rows)
        # transformers scores the last token that is not this one. Where the checkpoint names none it scores the last.
        self._text_config.pad_token_id = pad
        ids = torch.full((len(rows), width), pad, dtype=torch.int64)
        mask = torch.zeros(len(rows), width, dtype=torch.int64)
        for row, tokens in enumerate(rows):
            ids[row, : len(tokens)] = torch.tensor(list(tokens))
            mask[row, : len(tokens)] = 1
        device = self.parallel.device
        logits: Tensor = self.model(input_ids=ids.to(device), attention_mask=mask.to(device)).logits
        return logits

    def _unused_token(self, rows: Sequence[Sequence[int]]) -> int:
        used = {token for tokens in rows for token in tokens}
        return next(token for token in range(int(self._text_config.vocab_size) + 1) if token not in used)


def check_reward_model(path: str, label: int, trust_remote_code: bool) -> PretrainedConfig:
    """Read a reward model's configuration, seconds before its weights are loaded.

    Raises:
        ModelNotFoundError: there is none.
        ModelUnsupportedError: it is not a sequence classifier, or has no such label.
    """
    config = read_config(path, trust_remote_code=trust_remote_code)
    names = list(getattr(config, "architectures", None) or [])
    has_own_code = _AUTO_CLASS in (getattr(config, "auto_map", None) or {})
    if names and not has_own_code and not any("SequenceClassification" in name for name in names):
        raise ModelUnsupportedError(
            f"model.reward.path {path} is a {', '.join(names)}: a reward model is a sequence classifier, whose class "
            "ends in ForSequenceClassification"
        )
    if label >= int(config.num_labels or 0):
        raise ModelUnsupportedError(
            f"model.reward.label {label}: the model in {path} has {config.num_labels} labels, numbered from 0"
        )
    return config


def padded_parts(lengths: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Split sequences into parts of similar length whose rows times their longest row is at most `max_tokens`.

    Returns:
        The parts' row numbers, the longest rows first; a row that is longer than `max_tokens` is a part by itself.
    """
    parts: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda at: -lengths[at]):
        if parts and (len(parts[-1]) + 1) * longest <= max_tokens:
            parts[-1].append(row)
        else:
            parts.append([row])
            longest = lengths[row]
    return parts


def build_reward_model(
    config: PretrainedConfig, options: LoadOptions, parallel: ParallelMesh
) -> tuple[PreTrainedModel, Conversions]:
    """Build and shard a sequence classifier without memory."""
    config.use_cache = False
    auto: Any = AutoModelForSequenceClassification
    with without_memory():
        model: PreTrainedModel = auto.from_config(
            config, dtype=options.dtype, trust_remote_code=options.trust_remote_code
        )
    model.requires_grad_(False)
    conversions = Conversions(model)
    head = getattr(model, "score", None)
    if isinstance(head, nn.Linear):
        head.float()
        head.register_forward_pre_hook(lambda _, inputs: (inputs[0].float(),))
    # A rank that has all parameters computes with them, and not with FSDP's copies.
    left = set(model.parameters()) if parallel.dims.fsdp == 1 else set()
    for part in (*([head] if isinstance(head, nn.Linear) else []), *_layers(model), model):
        fully_shard(part, mesh=parallel.mesh, ignored_params=left)
    return model, conversions


def _load(path: str, config: PretrainedConfig, options: LoadOptions, parallel: ParallelMesh) -> nn.Module:
    model, conversions = build_reward_model(config, options, parallel)
    allocate(model, parallel.device)
    with open_weights(path, "model.reward.path") as weights:
        missing = load_weights(model, weights, conversions)
    if missing:
        raise ModelUnsupportedError(
            f"model.reward.path {path} has no weights for {', '.join(sorted(missing)[:4])}: it is not a trained "
            "sequence classifier"
        )
    module: nn.Module = model
    return module.eval()


def _layers(model: nn.Module) -> list[nn.Module]:
    """The layers of the backbone: the list of modules that holds most parameters."""

    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    sizes = [sum(parameter.numel() for parameter in modules.parameters()) for modules in lists]
    return list(lists[sizes.index(max(sizes))]) if lists else []
