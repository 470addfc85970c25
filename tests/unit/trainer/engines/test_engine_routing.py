"""Routing replay: recorded experts decide, the router learns through their weights, on one rank and on several."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import AutoModelForCausalLM
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.model import ActorModel, LoRA
from ppojob_api.v1alpha1.training import ActorSpec, LossAggregation
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine
from ppojob_trainer.engines.train.fsdp.routing import routers
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.maths.losses import Denominators
from ppojob_trainer.maths.packing import micro_batches
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError, rollout_batch
from tests.unit.trainer.engines import gradient_ranks, peer_ranks
from tests.unit.trainer.engines.fsdp_engines import policy_engine
from tests.unit.trainer.engines.test_engine_invariance import padded_loss
from tests.unit.trainer.engines.test_engine_peers import run_ranks
from tests.unit.trainer.engines.tiny_experts import (
    MIXTURES,
    NUM_EXPERTS,
    NUM_LAYERS,
    PER_TOKEN,
    save_tiny_experts,
)
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH
from tests.unit.trainer.padded import padded_inputs

AGGREGATION = LossAggregation.TOKEN_MEAN
COEFFICIENT = 0.3
Recording = np.ndarray[Any, Any]


@pytest.fixture(scope="module", params=["deepseek_v3", "qwen3_moe", pytest.param("mixtral", marks=pytest.mark.long)])
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def path(family: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_experts(tmp_path_factory.mktemp("experts") / family, family=family)


@pytest.fixture(scope="module")
def of_qwen3_moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_experts(tmp_path_factory.mktemp("experts") / "qwen3_moe")


@pytest.fixture(params=["qwen3_moe", "mixtral", "gpt_oss"])
def with_loss(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A model of a family for which transformers has a load-balancing loss."""
    return save_tiny_experts(tmp_path / request.param, family=request.param)


def recorded(batch: DataProto, rows: list[Recording]) -> DataProto:
    tokens = batch.prompts().to_lists(), batch.responses().to_lists()
    return batch.with_fields({Keys.ROUTED_EXPERTS: rollout_batch(*tokens, experts=rows)[Keys.ROUTED_EXPERTS]})


def random_recording(batch: DataProto, num_layers: int = NUM_LAYERS) -> DataProto:
    """Different experts for each token: a choice that went to another token would be seen."""
    random = np.random.default_rng(5)

    def row(length: int) -> Recording:
        scores = random.random((length - 1, num_layers, NUM_EXPERTS))
        return scores.argsort(axis=-1)[..., :PER_TOKEN].astype(np.uint8)

    return recorded(batch, [row(length) for length in batch.ragged(Keys.INPUT_IDS).lengths.tolist()])


def note_choice(chosen: dict[int, Tensor], layer: int, *call: Any) -> None:
    chosen[layer] = call[-1][2]


def own_recording(policy: FSDPEngine, batch: DataProto) -> DataProto:
    """What the policy's routers choose themselves, as an engine would record it; one sequence after the other."""
    rows = []
    for row in range(len(batch)):
        chosen: dict[int, Tensor] = {}
        found = routers(policy.module.backbone)
        hooks = [router.register_forward_hook(partial(note_choice, chosen, layer)) for layer, router in found]
        policy.forward(batch[row])
        for hook in hooks:
            hook.remove()
        of_dense = torch.zeros_like(chosen[NUM_LAYERS - 1])
        of_layers = [chosen.get(layer, of_dense) for layer in range(NUM_LAYERS)]
        rows.append(torch.stack(of_layers, dim=1)[:-1].numpy().astype(np.uint8))
    return recorded(batch, rows)


def make_policy(
    parallel: ParallelMesh,
    path: Path,
    max_tokens: int = 33,
    balance: float = 0.0,
    *,
    replays_experts: bool = False,
    **model: Any,
) -> FSDPEngine:
    training = ActorSpec(
        learning_rate=1e-3,
        max_tokens_per_gpu=max_tokens,
        entropy_coefficient=gradient_ranks.ENTROPY_COEFFICIENT,
        router_aux_loss_coefficient=balance,
    )
    actor = ActorModel(path=str(path), **model)
    run = {"total_steps": 9, "dtype": torch.float32, "replays_experts": replays_experts}
    return policy_engine(parallel, actor, training, gradient_ranks.KL_IN_LOSS, **run)


def log_probs(policy: FSDPEngine, batch: DataProto) -> Tensor:
    return policy.forward(batch).ragged(Keys.OLD_LOG_PROBS).values


def of_routers(policy: FSDPEngine) -> list[Tensor]:
    weights: list[Any] = [router.get_parameter("weight") for _, router in routers(policy.module.backbone)]
    return [weight.detach().to_local() for weight in weights]


def test_replay_removes_the_difference_that_other_choices_make(parallel: ParallelMesh, path: Path) -> None:
    """Two experts of each layer have almost the same scores, and differences as of another rounding decide."""
    batch = gradient_ranks.whole_batch()
    policy = make_policy(parallel, path)
    for _, router in routers(policy.module.backbone):
        for tensor in (router.get_parameter("weight").to_local(), *router.buffers()):  # type: ignore[attr-defined]
            if len(tensor) == NUM_EXPERTS:
                tensor.detach()[1] = tensor.detach()[0]
    expected, engine = log_probs(policy, batch), own_recording(policy, batch)
    torch.testing.assert_close(log_probs(policy, engine), expected, atol=1e-4, rtol=0)

    torch.manual_seed(3)
    for weight in of_routers(policy):
        weight.add_(torch.randn(weight.shape) * 1e-4)

    without, with_replay = ((log_probs(policy, each) - expected).abs().max() for each in (batch, engine))
    assert without > 0.1, "no choice changed: nothing was compared"
    assert with_replay < without / 20
    assert 0 < policy.update(engine)["actor/routing_differs"] < 0.5


def test_a_recording_decides_and_only_for_its_call(parallel: ParallelMesh, path: Path) -> None:
    batch = gradient_ranks.whole_batch()
    policy = make_policy(parallel, path)
    own = log_probs(policy, batch)
    assert (log_probs(policy, random_recording(batch)) - own).abs().mean() > 0.1
    torch.testing.assert_close(log_probs(policy, batch), own, atol=0, rtol=0)


def test_a_recording_decides_without_adapters_too(parallel: ParallelMesh, path: Path) -> None:
    """As for a reference policy: with adapters that have learned, it is the model without them."""
    batch = random_recording(gradient_ranks.whole_batch())
    expected = log_probs(make_policy(parallel, path), batch)
    policy = make_policy(parallel, path, lora=LoRA(rank=2))
    policy.update(batch)
    assert (log_probs(policy, batch) - expected).abs().max() > 1e-3

    reference = policy.forward(batch, with_adapters=False).ragged(Keys.OLD_LOG_PROBS).values

    torch.testing.assert_close(reference, expected, atol=1e-5, rtol=0)


def test_the_share_of_other_choices_is_counted_per_expert(parallel: ParallelMesh, path: Path) -> None:
    policy = make_policy(parallel, path, gradient_checkpointing=False, replays_experts=True)
    batch = gradient_ranks.whole_batch()
    own = own_recording(policy, batch)
    expected = make_policy(parallel, path, gradient_checkpointing=False).update(own)
    # Its choices do not count.
    policy.warm_up(9, RESPONSE_LENGTH)
    metrics = policy.update(own)
    of_experts = [name for name in metrics if name.startswith("actor/expert_")]
    assert len(of_experts) == 3
    assert {name: metrics[name] for name in of_experts} == {name: expected[name] for name in of_experts}
    assert metrics["actor/routing_differs"] == 0
    assert "actor/routing_differs" not in policy.update(batch)

    policy = make_policy(parallel, path, gradient_checkpointing=False)
    column = own.ragged(Keys.ROUTED_EXPERTS)
    values = column.values.clone().view(-1, NUM_LAYERS, PER_TOKEN)
    # In the last layer, where no later choice depends on it, the second expert of every token becomes another one.
    first, second = values[:, 2, 0].long(), values[:, 2, 1].long()
    values[:, 2, 1] = next_but(first, second).to(torch.uint8)
    changed = own.with_fields({Keys.ROUTED_EXPERTS: column.with_values(values.flatten())})
    num_choices = MIXTURES[path.name].num_sparse * PER_TOKEN
    assert policy.update(changed)["actor/routing_differs"] == pytest.approx(1 / num_choices)


def next_but(first: Tensor, second: Tensor) -> Tensor:
    """An expert that is neither of both."""
    following = (second + 1) % NUM_EXPERTS
    return torch.where(following == first, (following + 1) % NUM_EXPERTS, following)


def test_a_recording_of_another_model_is_refused(parallel: ParallelMesh, path: Path) -> None:
    batch = gradient_ranks.whole_batch()
    lengths = batch.ragged(Keys.INPUT_IDS).lengths.tolist()
    other = recorded(batch, [np.zeros((length - 1, 2, PER_TOKEN), dtype=np.uint8) for length in lengths])
    with pytest.raises(ProtocolError, match="has 4 values for each token, and the model has 3 layers with 2 experts"):
        make_policy(parallel, path).forward(other)


def plain_gradients(path: Path, batch: DataProto, monkeypatch: pytest.MonkeyPatch) -> dict[str, Tensor]:
    """The gradients of plain transformers with routers that choose what was recorded, on the padded batch."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    column, prompts = batch.ragged(Keys.ROUTED_EXPERTS), batch.prompts()
    longest = int(prompts.lengths.max())
    padded = torch.full((len(batch), longest + RESPONSE_LENGTH, NUM_LAYERS, PER_TOKEN), -1)
    # Prompts are padded on the left.
    for row, values in enumerate(column.rows()):
        found = values.view(-1, NUM_LAYERS, PER_TOKEN).long()
        first = longest - int(prompts.lengths[row])
        padded[row, first : first + len(found)] = found
    for layer, router in routers(model):
        router.forced = padded[:, :, layer].flatten(0, 1)
    kind: Any = type(router)
    choose = kind.forward

    def forward(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = functional.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
        chosen = torch.where(router.forced < 0, choose(router, hidden)[2], router.forced)
        if kind is DeepseekV3TopkRouter:
            scores = logits.sigmoid().gather(1, chosen)
            return logits, 2.5 * scores / scores.sum(dim=-1, keepdim=True), chosen
        # Of normalised weights: a softmax over the chosen experts alone.
        return logits, logits.gather(1, chosen).softmax(dim=-1), chosen

    monkeypatch.setattr(kind, "forward", forward)
    counts = Denominators.of(batch.padded(Keys.RESPONSE_MASK))
    padded_loss(model, batch, counts, AGGREGATION.value).backward()
    monkeypatch.undo()
    return {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


@pytest.mark.parametrize("gradient_checkpointing", [False, True])
def test_gradients_are_those_of_transformers_with_these_experts(
    parallel: ParallelMesh, path: Path, gradient_checkpointing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = random_recording(gradient_ranks.whole_batch())
    expected = plain_gradients(path, batch, monkeypatch)
    found = gradients_of_update(make_policy(parallel, path, gradient_checkpointing=gradient_checkpointing), batch)
    assert found.keys() == expected.keys()
    assert sum(".mlp.gate." in name for name in found) == MIXTURES[path.name].num_sparse
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        assert scale > 0, f"{name} has no gradient"
        torch.testing.assert_close(found[name] / scale, gradient / scale, atol=1e-4, rtol=0, msg=name)


def gradients_of_update(policy: FSDPEngine, batch: DataProto) -> dict[str, Tensor]:
    """The gradients of an update of one step, before they are clipped."""
    found: dict[str, Tensor] = {}
    clip = policy.optimizer.clip

    def observed() -> Tensor:
        found.update(gradient_ranks._whole_gradients(policy.module))
        return clip()

    policy.optimizer.clip = observed  # type: ignore[method-assign]
    policy.update(batch)
    return {name.removeprefix("language_model."): gradient for name, gradient in found.items()}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dims", [ParallelDims(sequence=2, expert=2), ParallelDims(context=2, expert=2)], ids=str)
def test_ranks_that_divide_tokens_and_experts_replay_and_balance_the_same(
    parallel: ParallelMesh, of_qwen3_moe: Path, dims: ParallelDims, tmp_path: Path
) -> None:
    path = of_qwen3_moe
    of_one = replayed_step(parallel, path, whole_recording(), tmp_path)

    run_ranks(dims, path, tmp_path, step_of_a_rank)

    for rank in range(dims.world_size):
        found = torch.load(tmp_path / f"rank-{rank}.pt")
        number = dims.shard_of(rank)
        rows = peer_ranks.rows_of(number, dims.num_shards)
        torch.testing.assert_close(found["log_probs"], of_one["log_probs"][rows], atol=1e-5, rtol=1e-4)
        for name, expected in of_one["metrics"].items():
            # The few tokens that fill up the slices are counted as used experts; of context ranks, slices are even.
            tolerance = 0.05 * dims.context if "/expert_i" in name else 1e-4
            assert found["metrics"][name] == pytest.approx(expected, rel=tolerance, abs=1e-5), name
        for name, tensor in found["weights"].items():
            assert (tensor - of_one["weights"][name]).abs().mean() < 1e-5, name


def whole_recording() -> DataProto:
    batch = random_recording(peer_ranks.whole_batch())
    return batch.with_fields({Keys.REF_LOG_PROB: batch.ragged(Keys.OLD_LOG_PROBS)})


def step_of_a_rank(parallel: ParallelMesh, model: Path, _shard: DataProto, folder: Path) -> dict[str, Any]:
    number = parallel.dims.shard_of(parallel.rank)
    batch = whole_recording()[peer_ranks.rows_of(number, parallel.dims.num_shards)]
    return replayed_step(parallel, model, batch, folder)


def replayed_step(parallel: ParallelMesh, model: Path, batch: DataProto, _: Path) -> dict[str, Any]:
    # The balance is that of a micro-batch, so its tokens are as many on both ranks together as on one.
    max_tokens = 34 // parallel.dims.slices
    policy = make_policy(parallel, model, max_tokens, COEFFICIENT, gradient_checkpointing=True)
    found = policy.forward(batch).padded(Keys.OLD_LOG_PROBS, RESPONSE_LENGTH)
    metrics = policy.update(batch)
    return {"log_probs": found, "metrics": metrics, "weights": gradient_ranks._weights(policy.module)}


def plain_balance_gradients(path: Path, batch: DataProto) -> tuple[float, dict[str, Tensor]]:
    """transformers' own load-balancing loss of a batch that is one micro-batch, and its gradients."""
    model = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    inputs = padded_inputs(batch, RESPONSE_LENGTH)
    logits = model(**inputs, output_router_logits=True).router_logits
    loss = load_balancing_loss_func(logits, NUM_EXPERTS, PER_TOKEN, inputs["attention_mask"])
    assert isinstance(loss, Tensor)
    (COEFFICIENT * loss).backward()
    return float(loss.detach()), {name: part.grad for name, part in model.named_parameters() if part.grad is not None}


def balanced_policy(parallel: ParallelMesh, path: Path, coefficient: float, **settings: Any) -> FSDPEngine:
    training = ActorSpec(learning_rate=1e-3, router_aux_loss_coefficient=coefficient, **settings)
    run: dict[str, Any] = {"total_steps": 9, "dtype": torch.float32}
    return policy_engine(parallel, ActorModel(path=str(path)), training, AlgorithmSpec(), **run)


def test_the_balance_loss_is_that_of_transformers(parallel: ParallelMesh, with_loss: Path) -> None:
    """Its gradients are the difference that the coefficient makes to an update of one micro-batch."""
    path = with_loss
    batch = gradient_ranks.whole_batch()
    loss, expected = plain_balance_gradients(path, batch)
    without, with_balance = balanced_policy(parallel, path, 0.0), balanced_policy(parallel, path, COEFFICIENT)
    of_policy = gradients_of_update(without, batch)
    found = gradients_of_update(with_balance, batch)
    for name, gradient in expected.items():
        scale = gradient.abs().max()
        # The last layer's experts and what follows them have no part in the loss.
        tolerance = 1e-4 * max(float(scale), float(of_policy[name].abs().max()))
        torch.testing.assert_close(found[name] - of_policy[name], gradient, atol=tolerance, rtol=0, msg=name)
    of_routers = [part for name, part in expected.items() if re.search(r"\.mlp\.(gate|router)\.", name)]
    assert len(of_routers) >= MIXTURES[path.name].num_sparse
    assert min(float(part.abs().max()) for part in of_routers) > 1e-3
    assert with_balance.update(batch)["actor/router_aux_loss"] < loss, "a step made the use of experts no more equal"
    again = balanced_policy(parallel, path, COEFFICIENT).update(batch)["actor/router_aux_loss"]
    assert again == pytest.approx(loss, rel=1e-4)


def test_micro_batches_weigh_as_many_as_their_tokens(parallel: ParallelMesh, of_qwen3_moe: Path) -> None:
    path = of_qwen3_moe
    batch = gradient_ranks.whole_batch()
    policy = balanced_policy(parallel, path, COEFFICIENT, max_tokens_per_gpu=16)
    lengths = batch.ragged(Keys.INPUT_IDS).lengths
    # No two sequences fit, but the engine may still put short ones together.
    (plan,) = policy._plans([batch])
    parts = micro_batches(lengths.tolist(), plan.max_tokens, plan.number)
    losses = [plain_balance_gradients(path, batch[part])[0] for part in parts]
    weights = [int(lengths[part].sum()) for part in parts]
    expected = sum(loss * weight for loss, weight in zip(losses, weights, strict=True)) / sum(weights)
    assert len(parts) > 2
    assert policy.update(batch)["actor/router_aux_loss"] == pytest.approx(expected, rel=1e-5)
