"""What the benchmark asks for: valid jobs in every layout, and exactly the tokens that the workload is defined by."""

import json
import string
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from ppojob_api.v1alpha1.training import Overlap
from ppojob_api.v1alpha1.validation import parse_manifest
from tests.bench import workload
from tests.bench.floors import floors_of, num_parameters, sync_floor
from tests.bench.layouts import layout, layouts

GPUS = {"actor": 1, "rollout": 1, "critic": 1, "ref": 1}
RECOMPUTED = {"actor": True, "critic": True}
TINY = workload.Size("tiny", num_prompts=8, prompt_tokens=20, response_tokens=16, vocabulary=512)


@pytest.mark.parametrize("num_gpus", [1, 2, 3, 4])
@pytest.mark.parametrize("device", ["CUDA", "CPU"])
def test_every_layout_is_a_valid_job_with_all_gpus(num_gpus: int, device: str) -> None:
    for sections in layouts(num_gpus).values():
        _, _, spec = parse_manifest(workload.job(Path("/w"), TINY, sections, 3, device))
        assert sum(pool.gpus for pool in spec.pools) == num_gpus


@pytest.mark.parametrize(
    ("name", "pools", "mode"),
    [
        ("colocated", {"all": 4}, "Serial"),
        ("colocated-1", {"all": 1}, "Serial"),
        ("colocated-auto", {"all": 4}, "Auto"),
        ("rollout-apart", {"trainer": 2, "rollout": 2}, "Overlapped"),
        ("rollout-apart-serial", {"trainer": 2, "rollout": 2}, "Serial"),
        ("rollout-apart-one-step-off", {"trainer": 2, "rollout": 2}, "OneStepOff"),
        ("rollout-apart-one-step-off-3", {"trainer": 2, "rollout": 2}, "OneStepOff"),
        ("split-serial", {"actor": 2, "critic": 2}, "Serial"),
        ("1+1", {"actor": 1, "critic": 1}, "Overlapped"),
        ("3+1", {"actor": 3, "critic": 1}, "Overlapped"),
        ("1+2-parallel-update", {"actor": 1, "critic": 2}, "ParallelUpdate"),
        ("1+1-ref-in-both", {"actor": 1, "critic": 1}, "Overlapped"),
        ("rollout-alone", {"actor": 1, "critic": 1, "rollout": 2}, "Overlapped"),
        ("ref-alone", {"actor": 2, "critic": 1, "ref": 1}, "Overlapped"),
        ("reward-alone", {"actor": 2, "critic": 1, "reward": 1}, "Overlapped"),
    ],
)
def test_a_name_says_pools_and_mode(name: str, pools: dict[str, int], mode: str) -> None:
    _, _, spec = parse_manifest(workload.job(Path("/w"), TINY, layout(name, 4), 3, "CUDA"))

    assert {pool.name: pool.gpus for pool in spec.pools} == pools
    assert spec.schedule.mode == mode
    assert (spec.model.reward is not None) == (name == "reward-alone")
    assert spec.schedule.max_staleness == {"rollout-apart-one-step-off": 1, "rollout-apart-one-step-off-3": 3}.get(name)


def test_the_reference_may_be_in_both_pools() -> None:
    assert layout("split-ref-in-both", 4)["placement"]["ref"] == ["actor", "critic"]


@pytest.mark.parametrize("overlap", list(Overlap))
@pytest.mark.parametrize("split", ["1+1", "split"])
def test_every_overlap_can_be_taken_away_by_name(split: str, overlap: Overlap) -> None:
    words = {Overlap.WEIGHT_SYNC: "weight-sync", Overlap.NEXT_GENERATION: "next-generation"}
    words |= {Overlap.OLD_LOG_PROB: "old-log-prob"}

    sections = layout(f"{split}-without-{words.get(overlap, overlap.lower())}", 2)

    _, _, spec = parse_manifest(workload.job(Path("/w"), TINY, sections, 3, "CUDA"))
    assert (spec.schedule.mode, spec.schedule.disabled_overlaps) == ("Overlapped", [overlap])


@pytest.mark.parametrize(
    ("name", "message"),
    [("4+1", "needs 5 GPUs, and there are 4"), ("reward", "there is no layout reward on 4 GPUs: take some of coloc")],
)
def test_a_layout_that_is_not_there_says_which_are(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        layout(name, 4)


def test_one_gpu_cannot_be_split() -> None:
    assert list(layouts(1)) == ["colocated"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with what a run of two steps needs."""
    folder = tmp_path_factory.mktemp("tiny")
    workload.prepare(folder, TINY, num_steps=2)
    return folder


def test_prompts_have_exactly_the_tokens_of_the_workload(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    rows = [json.loads(line) for line in (tiny / "prompts.jsonl").read_text(encoding="utf-8").splitlines()]
    lengths = {
        len(tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, return_dict=False)) for row in rows
    }
    assert (len(rows), lengths, len(tokenizer)) == (16, {20}, 512)


@pytest.mark.parametrize("shape", ["tiny", "tiny-experts"])
def test_contrast_makes_some_tokens_more_probable(tiny: Path, tmp_path: Path, shape: str) -> None:
    def spread(folder: Path, contrast: float) -> float:
        workload.prepare(folder, replace(TINY, shape=shape, contrast=contrast), num_steps=1)
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        with torch.no_grad():
            return float(model(torch.arange(256)[None]).logits.std())

    # `prepare` leaves a folder that is finished as it is.
    plain = tiny if shape == TINY.shape else tmp_path / "plain"
    assert spread(tmp_path / "contrast", 5.0) == pytest.approx(5 * spread(plain, 1.0), rel=0.02)


@pytest.mark.parametrize("size", [TINY, workload.Size()])
def test_varied_responses_end_by_chance(size: workload.Size) -> None:
    ends = workload.ends(size)

    assert len(set(ends)) == len(ends)
    # At each token, so that the mean length is 0.4 times the longest.
    assert len(ends) / size.vocabulary == pytest.approx(1 / (0.4 * size.response_tokens), rel=0.02)


def test_the_tokens_that_end_a_response_are_in_the_models_generation_settings(tiny: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny / "model")
    found = GenerationConfig.from_pretrained(tiny / "model").eos_token_id

    assert found == workload.ends(TINY)
    assert found[0] == tokenizer.eos_token_id
    assert not set(found) & set(tokenizer("".join(string.ascii_letters)).input_ids)


@pytest.mark.parametrize("is_varied", [False, True])
def test_only_varied_responses_may_end_early(is_varied: bool) -> None:
    size = replace(TINY, is_varied=is_varied)

    _, _, spec = parse_manifest(workload.job(Path("/w"), size, layout("colocated", 1), 3, "CUDA"))

    assert spec.rollout.ignore_eos is not is_varied
    assert spec.rollout.stop == []


def test_the_least_times_of_workload_w_by_hand() -> None:
    """0.5B on a device of 1 PFLOP/s and 5 TB/s: 164,352 tokens, 131,072 of them written."""
    least = floors_of(workload.SHAPES["0.5B"], workload.Size(), 1e15, 5e12, GPUS, RECOMPUTED)

    matrices = 24 * (2 * 896 * 896 + 896 * 256 + 3 * 896 * 4864)
    attention = 2 * 24 * 896 * 642 * 164_352
    forward = 2 * matrices * 164_352 + attention
    assert least["values"] == pytest.approx(forward / 1e15)
    assert least["old_log_prob"] == pytest.approx((forward + 2 * 151_936 * 896 * 131_072) / 1e15)
    assert least["update_critic"] == pytest.approx(4 * forward / 1e15)


def test_without_gradient_checkpointing_the_layers_are_computed_once_less_and_the_output_layer_is_not() -> None:
    def least(*, actor: bool, critic: bool) -> dict[str, float]:
        recomputes = {"actor": actor, "critic": critic}
        return floors_of(workload.SHAPES["0.5B"], workload.Size(), 1e15, 5e12, GPUS, recomputes)

    both, none = least(actor=True, critic=True), least(actor=False, critic=False)

    assert both["update_critic"] - none["update_critic"] == pytest.approx(none["values"])
    assert both["update_actor"] - none["update_actor"] == pytest.approx(none["values"])
    assert least(actor=False, critic=True)["update_critic"] == both["update_critic"]


def test_a_mixture_computes_the_experts_of_a_token_and_reads_all() -> None:
    shape = workload.SHAPES["4B-A0.9B"]
    dense = {name: value for name, value in shape.items() if "expert" not in name}
    one_expert, router = 3 * 2048 * 768, 2048 * 64

    def layers(experts: int) -> int:
        return 12 * (2 * 2048 * 2048 + 2048 * 2 * 4 * 128 + experts * one_expert + router)

    least = floors_of(shape, workload.Size(), 1e15, 5e12, GPUS, RECOMPUTED)
    without = floors_of({**dense, "intermediate_size": 0}, workload.Size(), 1e15, 5e12, GPUS, RECOMPUTED)

    assert num_parameters(shape, workload.Size()) == layers(64) + 151_936 * 2048
    assert least["values"] - without["values"] == pytest.approx(
        2 * 12 * (8 * one_expert + router) * 164_352 / 1e15 / GPUS["critic"]
    )
    assert least["gen"] - without["gen"] == pytest.approx(512 * 2 * 12 * (64 * one_expert + router) / 5e12)


def test_every_second_layer_reads_no_more_than_its_window() -> None:
    windowed = workload.SHAPES["20B-A3.6B"]
    full = {name: value for name, value in windowed.items() if name != "sliding_window"}

    def least(shape: dict[str, int]) -> dict[str, float]:
        return floors_of(shape, workload.Size(), 1e15, 5e12, GPUS, RECOMPUTED)

    # On average, a token reads half of the tokens, and within a window all but half of the window once.
    attention = 4 * 12 * 64 * 64 * (642 / 2 - (128 - 128**2 / 2 / 642)) * 164_352
    assert least(full)["values"] - least(windowed)["values"] == pytest.approx(attention / 1e15 / GPUS["critic"])
    # Twelve layers have keys and values of 128 tokens instead of 386, the mean length.
    read = 512 * 256 / GPUS["rollout"] * (386 - 128) * 12 * 2 * 8 * 64 * 2
    assert least(full)["gen"] - least(windowed)["gen"] == pytest.approx(read / 5e12)


def test_a_job_without_a_critic_has_no_least_times_of_one() -> None:
    gpus = {role: count for role, count in GPUS.items() if role != "critic"}

    least = floors_of(workload.SHAPES["0.5B"], workload.Size(), 1e15, 5e12, gpus, RECOMPUTED)

    everything = floors_of(workload.SHAPES["0.5B"], workload.Size(), 1e15, 5e12, GPUS, RECOMPUTED)
    assert set(everything) - set(least) == {"values", "update_critic"}
    assert all(least[phase] == everything[phase] for phase in least)


@pytest.mark.parametrize("name", ["0.5B", "1.5B", "7B", "4B-A0.9B", "7B-A1B", "20B-A3.6B", "30B-A3B"])
def test_the_parameters_of_a_shape_are_those_of_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    saved: list[int] = []

    def count(model: Any, *_: object, **__: object) -> None:
        saved.append(sum(parameter.numel() for parameter in model.parameters()))

    monkeypatch.setattr("transformers.PreTrainedModel.save_pretrained", count)
    with torch.device("meta"):
        workload._write_model(tmp_path, workload.Size(name), workload.SHAPES[name])

    # Biases and norms are not counted.
    assert num_parameters(workload.SHAPES[name], workload.Size(name)) == pytest.approx(saved[0], rel=0.001)


def test_weights_cross_a_link_once() -> None:
    shape = workload.SHAPES["0.5B"]

    # 494 million parameters in bfloat16 over 450 GB/s.
    assert num_parameters(shape, workload.Size()) == pytest.approx(494e6, rel=0.001)
    assert sync_floor(shape, workload.Size(), 450e9) == pytest.approx(2 * 494e6 / 450e9, rel=0.001)


def test_fields_are_set_as_kubernetes_reads_them() -> None:
    spec: dict[str, Any] = {"actor": {"miniBatchSize": 64}}
    workload.set_fields(spec, ["actor.learningRate=1e-5", "model.actor.lora={rank: 16}", "rollout.sleep=true"])
    assert spec == {
        "actor": {"miniBatchSize": 64, "learningRate": 1e-5},
        "model": {"actor": {"lora": {"rank": 16}}},
        "rollout": {"sleep": True},
    }
