"""A training engine in plain PyTorch: one process, on the CPU, in float32, without packing. A PPOJob names it by path.

It uses what a user's engine may use: the interface, the objectives, and what serves every engine. It refuses several
ranks, adapters and object stores.
"""

from __future__ import annotations

import copy
import math
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from ppojob_trainer.engines.errors import (
    CheckpointUnreadableError,
    ModelMismatchError,
    ModelUnsupportedError,
    NonFiniteError,
)
from ppojob_trainer.engines.train.batch import EngineMeta, split_minibatches
from ppojob_trainer.engines.train.engine import EngineSetup
from ppojob_trainer.engines.train.learning_rate import learning_rate_factor
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.model_fit import read_config
from ppojob_trainer.engines.train.objectives import UpdateResult
from ppojob_trainer.engines.weights.buckets import TensorSpec
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.protocol import DataProto, Keys, Meta, ProtocolError, Ragged

STATE = "state.pt"


class PlainEngine:
    """See the module's docstring. `load` sets the attributes without a value."""

    parallel: ParallelMesh
    model: Any
    value_head: nn.Linear
    adamw: torch.optim.AdamW

    def __init__(self, setup: EngineSetup, num_threads: int = 1) -> None:
        self.setup = setup
        self.num_threads = num_threads
        self.num_updates = self.num_skipped_in_a_row = 0

    def check(self) -> None:
        read_config(self.setup.path, trust_remote_code=False)
        if getattr(self.setup.model, "lora", None) is not None:
            raise ModelUnsupportedError("PlainEngine trains no adapters: remove lora")
        for field, size in self.setup.sizes.items():
            if size > 1:
                raise ModelMismatchError(f"{field} {size}: PlainEngine divides no model: use 1")

    def load(self, parallel: ParallelMesh, *, total_steps: int, stays_gathered: bool = False) -> None:
        if parallel.world_size > 1:
            raise ModelMismatchError(f"PlainEngine computes on one rank, not on {parallel.world_size}: use one GPU")
        torch.set_num_threads(self.num_threads)
        self.parallel = parallel
        self.model = AutoModelForCausalLM.from_pretrained(self.setup.path, dtype=torch.float32).eval()
        self.value_head = nn.Linear(self.model.config.hidden_size, 1)
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)
        self._factor = learning_rate_factor(self.setup.training, total_steps)
        training = self.setup.training
        first, second = training.betas
        self.adamw = torch.optim.AdamW(
            self._parameters(), lr=training.learning_rate, betas=(first, second), weight_decay=training.weight_decay
        )

    def warm_up(self, prompt_tokens: int, response_tokens: int) -> None:
        """Compile nothing."""

    @torch.no_grad()
    def forward(self, batch: DataProto, *, with_adapters: bool = True) -> DataProto:
        mask = batch.ragged(Keys.RESPONSE_MASK)
        width = int(mask.lengths.max())
        padded = self._outputs(batch, width)
        columns: dict[str, Ragged] = {
            name: mask.unpadded(output) for name, output in zip(self.setup.outputs, padded, strict=True)
        }
        return DataProto.from_dict(columns)

    def update(self, batch: DataProto) -> dict[str, float]:
        objective, started = self.setup.objective, time.perf_counter()
        assert objective is not None, "a frozen model is not updated"
        width = int(_meta(batch, EngineMeta.RESPONSE_LENGTH))
        minibatches = split_minibatches(batch, int(_meta(batch, EngineMeta.NUM_MINI_BATCHES)))
        steps = minibatches * int(_meta(batch, EngineMeta.EPOCHS))
        learning_rate = self.setup.training.learning_rate * self._factor(self.num_updates)
        self.adamw.param_groups[0]["lr"] = learning_rate
        result = UpdateResult(len(steps), 0, learning_rate)
        for minibatch in steps:
            mask = minibatch.padded(Keys.RESPONSE_MASK, width)
            fields = {name: minibatch.padded(name, width) for name in objective.columns(minibatch)}
            fields[Keys.RESPONSE_MASK] = mask.long()
            loss, shares = objective.loss(self._outputs(minibatch, width), fields, Denominators.of(mask))
            loss.backward()
            result.grad_norms.append(self._step())
            for name, share in shares.items():
                result.shares[name] = result.shares.get(name, 0.0) + float(share)
            result.first_shares = result.first_shares or dict(result.shares)
        self.num_updates += 1
        result.num_skipped = sum(not math.isfinite(norm) for norm in result.grad_norms)
        result.seconds = time.perf_counter() - started
        return objective.metrics(batch, result, self.parallel)

    def weights(self) -> _Weights:
        return _Weights(self.model, self.setup.dtype)

    def export(self, folder: Path) -> None:
        _refuse_existing(folder)
        copy.deepcopy(self.model).to(torch.bfloat16).save_pretrained(folder)
        for file in Path(self.setup.path).glob("*token*"):
            shutil.copyfile(file, folder / file.name)

    def save(self, location: str | Path, *, in_background: bool = False) -> None:
        folder = Path(location)
        _refuse_existing(folder)
        folder.mkdir(parents=True, exist_ok=True)
        counts = (self.num_updates, self.num_skipped_in_a_row)
        parts = {"model": self.model.state_dict(), "head": self.value_head.state_dict()}
        state = {**parts, "adamw": self.adamw.state_dict(), "counts": counts, "random": torch.get_rng_state()}
        torch.save(state, folder / STATE)

    def is_saved(self) -> bool:
        return True

    def restore(self, location: str | Path) -> None:
        try:
            state = torch.load(Path(location) / STATE)
            self.model.load_state_dict(state["model"])
            self.value_head.load_state_dict(state["head"])
        except (OSError, RuntimeError, KeyError) as error:
            raise CheckpointUnreadableError(f"checkpoint {location} cannot be read into this model: {error}") from error
        self.adamw.load_state_dict(state["adamw"])
        self.num_updates, self.num_skipped_in_a_row = state["counts"]
        torch.set_rng_state(state["random"])

    def _parameters(self) -> list[nn.Parameter]:
        if not self.setup.has_value_head:
            return list(self.model.parameters())
        return [*self.model.base_model.parameters(), *self.value_head.parameters()]

    def _outputs(self, batch: DataProto, width: int) -> tuple[Tensor, ...]:
        """Return the outputs [B, width], one sequence at a time."""
        temperature = 1.0 if self.setup.has_value_head else _meta(batch, Meta.TEMPERATURE)
        tokens, mask = batch.ragged(Keys.INPUT_IDS), batch.padded(Keys.RESPONSE_MASK, width)
        rows: list[list[Tensor]] = []
        for number, length in enumerate(batch.ragged(Keys.RESPONSE_MASK).lengths.tolist()):
            start = int(tokens.starts[number])
            ids = tokens.values[start : start + int(tokens.lengths[number])].long()
            hidden = self.model.base_model(input_ids=ids[None]).last_hidden_state[0, -length - 1 : -1]
            found = self._of_row(hidden, ids[-length:], temperature)
            rows.append([nn.functional.pad(values, (0, width - length)) for values in found])
        return tuple(torch.stack(list(column)) * mask for column in zip(*rows, strict=True))

    def _of_row(self, hidden: Tensor, labels: Tensor, temperature: float) -> list[Tensor]:
        if self.setup.has_value_head:
            return [self.value_head(hidden).squeeze(-1)]
        log_probs = torch.log_softmax(self.model.lm_head(hidden) / temperature, dim=-1)
        entropies = -(log_probs.exp() * log_probs).sum(-1)
        return [log_probs.gather(-1, labels[:, None]).squeeze(-1), entropies]

    def _step(self) -> float:
        """Clip the gradient, and step if it is finite; return its norm before."""
        training, parameters = self.setup.training, self._parameters()
        limit = training.grad_clip or math.inf
        norm = float(torch.nn.utils.clip_grad_norm_(parameters, limit))
        is_finite = math.isfinite(norm)
        if is_finite:
            self.adamw.step()
        self.adamw.zero_grad(set_to_none=True)
        self.num_skipped_in_a_row = 0 if is_finite else self.num_skipped_in_a_row + 1
        if self.num_skipped_in_a_row >= training.max_non_finite_steps:
            raise NonFiniteError(f"the gradient's norm was {norm} in {self.num_skipped_in_a_row} steps in a row")
        return norm


class _Weights:
    """The parameters of a model that nobody divides."""

    def __init__(self, model: nn.Module, dtype: torch.dtype) -> None:
        self.model, self.dtype = model, dtype

    def specs(self) -> list[TensorSpec]:
        dtype = str(self.dtype).removeprefix("torch.")
        return [TensorSpec(name, tuple(value.shape), dtype) for name, value in self.model.named_parameters()]

    @torch.no_grad()
    def gather(self) -> Iterator[Tensor]:
        yield from (value.detach().to(self.dtype) for value in self.model.parameters())


def _meta(batch: DataProto, key: str) -> float:
    if key not in batch.meta_info:
        raise ProtocolError(f"the batch has no meta_info entry {key!r}")
    return float(batch.meta_info[key])


def _refuse_existing(folder: Path) -> None:
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} exists")
