"""The variants of an engine are jobs that the API takes, with arguments that vLLM has, and their ratios are right."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import NO_DRAFTS, Drafts, RolloutOptions, engine_arguments
from tests.bench import workload
from tests.bench.bench_generation import table
from tests.bench.engine_extension import MeasuringExtension
from tests.bench.generation import Alone, _lengths
from tests.bench.layouts import layout
from tests.bench.measurement import spec_of
from tests.bench.variants import EXTENSION, VARIANTS

# Loading vLLM takes many seconds.
pytestmark = pytest.mark.slow

TINY = workload.Size("tiny", num_prompts=8, prompt_tokens=20, response_tokens=16, vocabulary=512)


@pytest.mark.parametrize("name", VARIANTS)
def test_a_variant_is_a_valid_job_with_arguments_of_vllm(name: str) -> None:
    from vllm import AsyncEngineArgs

    variant = VARIANTS[name]
    spec = variant.spec(spec_of(workload.job(Path("/w"), TINY, layout("colocated-1", 1), 3, "CUDA")))
    options = variant.options(RolloutOptions.from_spec(spec, spec.placement.rollout_pools[0]))

    arguments = engine_arguments(options)

    assert options.device is Device.CUDA
    assert arguments["worker_extension_cls"] == EXTENSION
    assert arguments.keys() <= {field.name for field in dataclasses.fields(AsyncEngineArgs)}
    assert variant.arguments.items() <= arguments.items()
    assert ("speculative_config" in arguments) is ("speculative" in variant.rollout)
    assert all(hasattr(MeasuringExtension, f"ppojob_{call}") for call in variant.calls)


def test_varied_lengths_belong_to_the_seeds() -> None:
    found = _lengths(range(2000), 512, is_varied=True)

    assert found[700:900] == _lengths(range(700, 900), 512, is_varied=True)
    assert {1, 512} >= {min(found), max(found)}
    assert 0.3 * 512 < sum(found) / len(found) < 0.45 * 512
    assert _lengths(range(3), 512, is_varied=False) == [512] * 3


def test_the_table_has_ratios_and_drafts() -> None:
    found = {
        "default": {8: Alone((2.0, 4.0, 3.0), NO_DRAFTS)},
        "drafts": {8: Alone((1.5, 1.4, 9.0), Drafts(num_steps=100, num_drafted=40, num_accepted=60))},
    }

    shown = table(found, (8,))

    assert [list(column.cells) for column in shown.columns] == [
        ["default", "drafts"],
        ["3.000 (1.00x)", "1.500 (2.00x)"],
        ["-", "1.50 40%"],
    ]


def test_a_model_that_repeats_does_so_as_often_as_wanted(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    workload.prepare(tmp_path, TINY, 1)
    workload.let_repeat(tmp_path, 0.7)

    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32)
    text = torch.tensor([[5, 9, 9, 30, 2, 2, 61, 17, 400, 300]])
    with torch.no_grad():
        probabilities = model(text).logits[0].softmax(-1)

    assert float(probabilities.gather(1, text[0, :, None]).mean()) == pytest.approx(0.7, abs=0.15)
