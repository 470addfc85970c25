"""The memory of adapters on GPUs and hosts, computed by hand, and how many parameters they have."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from ppojob_api.v1alpha1.engine import Engine
from ppojob_api.v1alpha1.model import LoRA
from ppojob_api.v1alpha1.training import ActorSpec
from ppojob_trainer.engines.errors import ModelUnsupportedError
from ppojob_trainer.main.host_memory import host_needs
from ppojob_trainer.main.memory_fit import Need, needs
from ppojob_trainer.worker_groups.roles.trained import ModelSize, ModelSource, size_of
from tests.unit.trainer.engines.tiny_experts import EXPERT_SIZE, NUM_EXPERTS, save_tiny_experts
from tests.unit.trainer.main.test_host_memory import sizes as sizes_with_hosts
from tests.unit.trainer.main.test_host_memory import spec as spec_with_hosts
from tests.unit.trainer.main.test_memory_fit import GB, sizes, spec_of

LORA = {"rank": 8}


def test_adapters_have_float32_weights_gradients_and_moments() -> None:
    """Of 1 B frozen parameters on two GPUs, and 0.1 B in adapters."""
    tenth = {"actor": replace(sizes(1)["actor"], in_adapters=GB // 10)}
    (adapted,) = needs(spec_of(lora=LORA), tenth)["a"]
    states = (adapted.weights, adapted.gradients, adapted.optimizer, adapted.resident, adapted.gathered)
    assert states == pytest.approx((1.2 * GB, 0.2 * GB, 0.4 * GB, 1.6 * GB, 2.6 * GB))
    assert not adapted.is_returned
    (kept,) = needs(spec_of(lora=LORA, offload={"optimizer": True}), tenth)["a"]
    assert kept.resident == pytest.approx(1.2 * GB)
    assert kept.is_returned


def test_of_adapters_of_divided_experts_those_of_a_rank_stay_gathered() -> None:
    """Of 1 B frozen parameters on four GPUs, 0.8 B are of experts, and 0.08 B of 0.1 B in adapters are of theirs.

    A GPU that has its experts alone gathers only their adapters, which are trained.
    """
    spec = spec_of(4, lora=LORA)
    mixture = replace(
        sizes(1)["actor"], in_experts=8 * GB // 10, in_adapters=GB // 10, in_expert_adapters=8 * GB // 100
    )

    def need(size: int, adapted: ModelSize = mixture) -> Need:
        divided = spec.actor.model_copy(update={"expert_parallel_size": size})
        (found,) = needs(spec.model_copy(update={"actor": divided}), {"actor": adapted})["a"]
        return found

    # 2 bytes of each parameter; of each in an adapter 4 more, for its gradient.
    assert need(1).gathered == pytest.approx((2 * 1 + 6 * 0.1) * GB)
    assert need(2).gathered == pytest.approx((2 * (0.2 + 0.4) + 6 * (0.02 + 0.04)) * GB)
    assert need(4).gathered == pytest.approx((2 * 0.2 + 6 * (0.02 + 0.02)) * GB)
    # Whole parameters are divided over all GPUs, however experts are.
    assert replace(need(4), gathered=0) == replace(need(1), gathered=0)
    other_layers = replace(mixture, in_expert_adapters=0)
    assert need(4, other_layers).gathered == pytest.approx((2 * 0.2 + 6 * 0.1) * GB)


def test_frozen_layers_that_tensor_parallel_ranks_have_alone_are_not_gathered() -> None:
    """Of 1 B frozen parameters on two GPUs, 0.8 B are of experts, which FSDP shards over tensor-parallel ranks too."""
    spec = spec_of(2, lora=LORA)
    mixture = replace(sizes(1)["actor"], in_experts=8 * GB // 10)

    def gathered(adapted: ModelSize, **actor: int) -> float:
        divided = spec.model_copy(update={"actor": spec.actor.model_copy(update=actor)})
        (found,) = needs(divided, {"actor": adapted})["a"]
        return found.gathered

    assert gathered(mixture) == pytest.approx(2 * 1 * GB)
    assert gathered(mixture, tensor_parallel_size=2) == pytest.approx(2 * 0.8 * GB)
    assert gathered(mixture, tensor_parallel_size=2, expert_parallel_size=2) == 0
    assert gathered(replace(mixture, in_experts=0), tensor_parallel_size=2) == 0


def test_they_are_offloaded_and_saved_with_their_moments() -> None:
    tenth = {"actor": replace(sizes_with_hosts(1, 64)["actor"], in_adapters=GB // 10)}
    (adapted,) = host_needs(spec_with_hosts(lora=LORA, offload={"parameters": True}), tenth)["one"]
    assert (adapted.offloaded, adapted.staged) == pytest.approx((2.4 * GB, 0.8 * GB))
    (both,) = host_needs(spec_with_hosts(lora=LORA, offload={"parameters": True, "optimizer": True}), tenth)["one"]
    assert (both.offloaded, both.staged) == pytest.approx((3.2 * GB, 0))


def test_their_parameters_are_counted_apart(tmp_path: Path) -> None:
    """Of experts too; names that the model does not have are refused before anything is loaded."""
    config = AutoConfig.from_pretrained(save_tiny_experts(tmp_path))

    def counted(*targets: str, training: ActorSpec | None = None) -> ModelSize:
        lora = LoRA(rank=4, target_modules=list(targets))
        return size_of(config, ModelSource("", trust_remote_code=False, lora=lora), 0, training)

    # One of three layers is dense, with 64 numbers in between.
    assert counted("gate_proj").in_adapters == 4 * (2 * NUM_EXPERTS * (48 + EXPERT_SIZE) + 48 + 64)
    assert counted("gate_proj").in_expert_adapters == 4 * 2 * NUM_EXPERTS * (48 + EXPERT_SIZE)
    without = [replace(counted(name), in_adapters=0, in_expert_adapters=0) for name in ("gate_proj", "q_proj")]
    assert without[0] == without[1]
    assert counted("q_proj").in_expert_adapters == 0 < counted("q_proj").in_adapters
    with pytest.raises(ModelUnsupportedError, match=r"\['experts'\] are no linear layers"):
        counted("experts")
    # A user's engine decides what the names mean.
    of_user = ActorSpec().model_copy(update={"engine": Engine.CLASS})
    assert counted("experts", training=of_user).in_adapters == 0


def test_compiled_layers_with_divided_experts_keep_two_inputs() -> None:
    mixture = replace(sizes(1)["actor"], layers=10, hidden=1000, in_experts=8 * GB // 10)

    def activations(size: int, **model: Any) -> float:
        spec = spec_of(4, lora=LORA, **model)
        divided = spec.actor.model_copy(update={"expert_parallel_size": size})
        (found,) = needs(spec.model_copy(update={"actor": divided}), {"actor": mixture})["a"]
        return found.activations

    # 16,384 tokens, and two bytes of each hidden state.
    assert activations(2, compile=True) - activations(2) == pytest.approx(16_384 * 10 * 2 * 1000)
    assert activations(1, compile=True) == activations(1)
