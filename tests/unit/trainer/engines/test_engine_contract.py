"""What `TrainEngine` promises holds for each engine; a PPOJob names it, and the loader creates it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from ppojob_api.v1alpha1.algorithm import KL, AlgorithmSpec
from ppojob_api.v1alpha1.engine import EngineClass
from ppojob_api.v1alpha1.model import ActorModel, FrozenModel, Offload, TrainedModel
from ppojob_api.v1alpha1.training import ActorSpec, CriticSpec, LearningRateSchedule
from ppojob_trainer.engines.errors import (
    CheckpointUnreadableError,
    EngineClassError,
    ModelNotFoundError,
    NonFiniteError,
)
from ppojob_trainer.engines.train.engine import EngineSetup, TrainEngine
from ppojob_trainer.engines.train.loader import METHODS, make_engine
from ppojob_trainer.engines.train.mesh import ParallelMesh
from ppojob_trainer.engines.train.objectives import PolicyObjective, ValueObjective
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError
from tests.unit.trainer.engines.tiny_llama import RESPONSE_LENGTH, VOCABULARY, make_batch, save_tiny_model
from tests.unit.trainer.padded import padded_inputs, padded_responses, response_part

PLAIN = Path("tests/plain_engine.py").absolute()
ENGINES: dict[str, dict[str, Any]] = {
    "FSDP": {},
    "PlainEngine": {"engine": "Class", "engine_class": EngineClass(path=str(PLAIN), class_name="PlainEngine")},
}
BOTH = Offload(parameters=True, optimizer=True)
Make = Callable[..., TrainEngine]


@pytest.fixture(params=sorted(ENGINES))
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def actor(engine_name: str, model_path: Path, parallel: ParallelMesh) -> Make:
    def make(offload: Offload | None = None, path: Path = model_path, **training: Any) -> TrainEngine:
        engine = make_engine(actor_setup(engine_name, path, offload, **training))
        engine.load(parallel, total_steps=4)
        return engine

    return make


@pytest.fixture
def critic(engine_name: str, model_path: Path, parallel: ParallelMesh) -> Make:
    def make(offload: Offload | None = None, **training: Any) -> TrainEngine:
        spec = CriticSpec(**{"learning_rate": 1e-2, "max_tokens_per_gpu": 40, **ENGINES[engine_name], **training})
        model = TrainedModel(path=str(model_path), offload=offload or Offload())
        engine = make_engine(EngineSetup(model, spec, ValueObjective(spec), has_value_head=True, dtype=torch.float32))
        engine.load(parallel, total_steps=4)
        return engine

    return make


def actor_setup(name: str, path: Path, offload: Offload | None = None, **training: Any) -> EngineSetup:
    spec = ActorSpec(**{"learning_rate": 1e-2, "max_tokens_per_gpu": 40, **ENGINES[name], **training})
    algorithm = AlgorithmSpec(kl=KL(in_loss=True, loss_coefficient=0.1))
    model = ActorModel(path=str(path), offload=offload or Offload())
    return EngineSetup(model, spec, PolicyObjective(spec, algorithm), dtype=torch.float32)


def weights_of(engine: TrainEngine) -> dict[str, Tensor]:
    source = engine.weights()
    return {spec.name: each.clone() for spec, each in zip(source.specs(), source.gather(), strict=True)}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_forward_gives_a_policys_log_probs_and_entropies_in_the_rows_order(
    actor: Make, model_path: Path, batch: DataProto
) -> None:
    batch.ragged(Keys.RESPONSE_MASK).values[3] = False
    found = actor().forward(batch)
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    responses, mask = padded_responses(batch), batch.padded(Keys.RESPONSE_MASK)
    with torch.no_grad():
        logits = model(**padded_inputs(batch)).logits
    log_p = torch.log_softmax(response_part(logits, responses.shape[1]) / 0.7, dim=-1)
    chosen = log_p.gather(-1, responses.unsqueeze(-1)).squeeze(-1) * mask
    assert found.columns.keys() == {Keys.OLD_LOG_PROBS, Keys.ENTROPYS}
    torch.testing.assert_close(found.padded(Keys.OLD_LOG_PROBS), chosen, atol=2e-5, rtol=1e-4)
    entropies = -(log_p.exp() * log_p).sum(-1) * mask
    torch.testing.assert_close(found.padded(Keys.ENTROPYS), entropies, atol=2e-5, rtol=1e-4)
    assert found.ragged(Keys.OLD_LOG_PROBS).values[3] == 0


def test_forward_gives_a_critics_values(critic: Make, batch: DataProto) -> None:
    batch.ragged(Keys.RESPONSE_MASK).values[3] = False
    engine = critic()
    engine.update(batch)
    found = engine.forward(batch)
    assert found.columns.keys() == {Keys.VALUES}
    column = found.ragged(Keys.VALUES)
    assert column.dtype == torch.float32
    assert torch.equal(column.lengths, batch.ragged(Keys.RESPONSE_MASK).lengths)
    assert column.values[3] == 0
    assert column.values.abs().sum() > 0


def test_a_frozen_policy_computes_as_the_one_that_is_trained(
    engine_name: str, actor: Make, model_path: Path, parallel: ParallelMesh, batch: DataProto
) -> None:
    model = FrozenModel(path=str(model_path))
    reference = make_engine(EngineSetup(model, ActorSpec(**ENGINES[engine_name]), None, dtype=torch.float32))
    reference.load(parallel, total_steps=4)
    found, expected = (engine.forward(batch).padded(Keys.OLD_LOG_PROBS) for engine in (reference, actor()))
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-4)


def test_check_refuses_a_model_that_is_not_there_before_anything_is_loaded(engine_name: str, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError, match=str(tmp_path / "nothing")):
        make_engine(actor_setup(engine_name, tmp_path / "nothing")).check()


def test_an_update_changes_the_weights_and_returns_the_objectives_metrics(actor: Make, batch: DataProto) -> None:
    engine = actor()
    before = weights_of(engine)
    metrics = engine.update(batch)
    after = weights_of(engine)
    assert all(not torch.equal(before[name], after[name]) for name in before)
    assert metrics["actor/grad_norm"] > 0
    assert metrics["actor/kl_loss"] != 0
    assert metrics["actor/non_finite_steps"] == 0
    assert {"actor/pg_loss", "actor/entropy", "actor/lr", "actor/kl_coef"} <= metrics.keys()


def test_the_learning_rate_follows_the_schedule_by_updates(actor: Make, batch: DataProto) -> None:
    engine = actor(learning_rate_schedule=LearningRateSchedule.LINEAR)
    rates = [engine.update(batch)["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])


def test_each_minibatch_is_an_optimizer_step_and_epochs_repeat_them(actor: Make) -> None:
    at_once, one_by_one = actor(), actor()
    at_once.update(make_batch(8, num_mini_batches=2, epochs=2))
    whole = make_batch(8, num_mini_batches=1)
    for part in [*whole.split(4), *whole.split(4)]:
        one_by_one.update(part)
    found, expected = weights_of(at_once), weights_of(one_by_one)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, atol=1e-6, rtol=1e-5)


def test_a_step_whose_gradient_is_not_finite_changes_nothing_and_too_many_fail(actor: Make) -> None:
    engine, bad = actor(max_non_finite_steps=2), make_batch(8, num_mini_batches=1)
    bad.ragged(Keys.ADVANTAGES).values[0] = float("inf")
    before = weights_of(engine)
    assert engine.update(bad)["actor/non_finite_steps"] == 1
    assert_equal(weights_of(engine), before)
    with pytest.raises(NonFiniteError):
        engine.update(bad)


def test_the_gradient_is_clipped(actor: Make) -> None:
    # Without moments of earlier steps, AdamW's first step is the same for every length of the gradient; the second is
    # not.
    first, second = make_batch(8, num_mini_batches=1, seed=1), make_batch(8, num_mini_batches=1, seed=2)
    free, clipped = actor(grad_clip=0.0), actor(grad_clip=1e-3)
    for engine in (free, clipped):
        assert engine.update(first)["actor/grad_norm"] > 1e-2, "the norm before clipping"
        engine.update(second)
    assert any(not torch.equal(weights_of(free)[name], value) for name, value in weights_of(clipped).items())


@pytest.mark.parametrize("missing", ["temperature", "num_mini_batches", "epochs", "response_length"])
def test_a_batch_that_does_not_say_how_is_refused_by_name(actor: Make, batch: DataProto, missing: str) -> None:
    del batch.meta_info[missing]
    with pytest.raises(ProtocolError, match=f"no meta_info entry '{missing}'"):
        actor().update(batch)


def test_an_update_of_a_critic_moves_the_values_to_the_returns(critic: Make, batch: DataProto) -> None:
    engine = critic(clip_range_value=1e6)
    wanted = batch.with_fields({Keys.RETURNS: batch.ragged(Keys.RETURNS), **engine.forward(batch).columns})
    metrics = [engine.update(wanted) for _ in range(4)]
    assert metrics[-1]["critic/vf_loss"] < metrics[0]["critic/vf_loss"]
    assert {"critic/grad_norm", "critic/lr", "critic/non_finite_steps", "critic/vf_explained_var"} <= metrics[0].keys()


@pytest.mark.parametrize("in_background", [False, True])
def test_a_run_resumes_from_what_the_engine_was_when_it_was_saved(
    actor: Make, batch: DataProto, tmp_path: Path, in_background: bool
) -> None:
    saved, resumed = actor(), actor()
    saved.update(batch)
    saved.save(tmp_path / "step", in_background=in_background)
    expected = saved.update(batch)
    # It is no result of the batch.
    expected.pop("timing_s/checkpoint/wait_actor", None)
    while not saved.is_saved():
        pass
    resumed.restore(tmp_path / "step")
    assert resumed.update(batch) == expected
    with pytest.raises(FileExistsError):
        saved.save(tmp_path / "step")


def test_a_checkpoint_that_is_missing_or_of_another_model_is_refused(actor: Make, tmp_path: Path) -> None:
    actor().save(tmp_path / "step")
    other = actor(path=save_tiny_model(tmp_path / "other", hidden_size=32))
    for name in ("nothing", "step"):
        with pytest.raises(CheckpointUnreadableError, match=str(tmp_path / name)):
            other.restore(tmp_path / name)


def test_offloading_changes_no_number(actor: Make, critic: Make, batch: DataProto) -> None:
    for make in (actor, critic):
        plain, offloaded = make(), make(offload=BOTH)
        for _ in range(2):
            assert offloaded.update(batch) == plain.update(batch)
        for name in offloaded.forward(batch).columns:
            assert torch.equal(*(engine.forward(batch).ragged(name).values for engine in (plain, offloaded)))


def test_a_warm_up_changes_nothing(actor: Make, batch: DataProto) -> None:
    # The entropy bonus has a gradient for any batch.
    plain, warm = actor(entropy_coefficient=0.1), actor(entropy_coefficient=0.1)
    random = torch.get_rng_state()
    warm.warm_up(9, RESPONSE_LENGTH)
    assert torch.equal(torch.get_rng_state(), random)
    assert warm.update(batch) == plain.update(batch)


def test_weights_are_whole_and_have_huggingfaces_names(actor: Make, model_path: Path) -> None:
    engine = actor()
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32)
    assert_equal(weights_of(engine), {name: value.detach() for name, value in model.named_parameters()})
    for spec, tensor in zip(engine.weights().specs(), engine.weights().gather(), strict=True):
        assert (spec.shape, spec.torch_dtype) == (tuple(tensor.shape), tensor.dtype)


def test_an_export_is_a_model_of_huggingface_with_the_current_weights(
    actor: Make, batch: DataProto, tmp_path: Path
) -> None:
    engine = actor()
    engine.update(batch)
    engine.export(tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    expected = {name: value.to(torch.bfloat16) for name, value in weights_of(engine).items()}
    assert_equal({name: value.detach() for name, value in model.named_parameters()}, expected)
    assert model.config.vocab_size == VOCABULARY
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    with pytest.raises(FileExistsError):
        engine.export(tmp_path / "model")


def test_the_engines_train_the_same(model_path: Path, parallel: ParallelMesh, batch: DataProto) -> None:
    metrics: list[dict[str, float]] = []
    for name in ENGINES:
        engine = make_engine(actor_setup(name, model_path))
        engine.load(parallel, total_steps=4)
        metrics += [engine.update(batch) for _ in range(2)][-1:]
    assert metrics[0] == pytest.approx(metrics[1], rel=1e-2, abs=1e-4)


ENGINE_FILE = f"""
class Empty:
    def __init__(self, setup): ...

class Whole(Empty): ...
for name in {METHODS}:
    setattr(Whole, name, lambda self: None)
"""


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (
            {"class_name": "Wohle"},
            r"actor\.engineClass: .*own\.py has no class 'Wohle': set actor\.engineClass\.",
        ),
        ({"class_name": "Empty"}, r"actor\.engineClass: Empty has no method check, load, .*write all methods"),
        (
            {"class_name": "Whole", "kwargs": {"a": 1}},
            r"actor\.engineClass: Whole\(setup\) cannot be .*kwargs a",
        ),
        ({"class_name": "Whole", "path": "/nowhere.py"}, r"actor\.engineClass\.path '/nowhere\.py': there is no such"),
    ],
)
def test_a_class_that_is_no_engine_is_refused_by_its_field(tmp_path: Path, block: dict[str, Any], says: str) -> None:
    (tmp_path / "own.py").write_text(ENGINE_FILE)
    spec = ActorSpec(engine="Class", engine_class=EngineClass(**{"path": str(tmp_path / "own.py"), **block}))
    with pytest.raises(EngineClassError, match=says):
        make_engine(EngineSetup(ActorModel(path="/model"), spec, None))
