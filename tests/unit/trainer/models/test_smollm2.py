"""The packaged SmolLM2 becomes a HuggingFace folder: a real conversion, once, and the refusals."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ppojob_trainer.models import smollm2


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    output = tmp_path_factory.mktemp("models") / "smollm2"
    return smollm2.prepare(output)


@pytest.mark.slow
def test_the_folder_is_complete_and_nothing_else_is_left(folder: Path) -> None:
    assert smollm2.is_prepared(folder)
    assert [path.name for path in folder.parent.iterdir()] == ["smollm2"]
    config = json.loads((folder / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("llama", "bfloat16")
    assert "quantization_config" not in config
    # Pods may run as another user than the one who prepared the model.
    assert all(path.stat().st_mode & 0o044 == 0o044 for path in [folder, *folder.iterdir()])


@pytest.mark.slow
def test_the_log_of_the_command_has_the_folder_and_no_progress_bars(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from ppojob_trainer.cli import main; main()", "prepare-model"]
    done = subprocess.run([*command, "--output", tmp_path / "model"], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == (f"{tmp_path}/model\n", "")


@pytest.mark.slow
def test_a_second_call_does_nothing(folder: Path, monkeypatch) -> None:
    monkeypatch.setattr(smollm2, "_convert", lambda *_: pytest.fail("converted again"))
    assert smollm2.prepare(folder) == folder


@pytest.mark.slow
def test_it_speaks_english_and_has_a_chat_template(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([tokenizer("The capital of France is Paris, and the sun rises in the east.")["input_ids"]])
    with torch.no_grad():
        loss = model(ids, labels=ids).loss.item()
    # Weights in a wrong order give about log(49152) = 10.8.
    assert loss < 3.5


def test_a_killed_conversion_leaves_nothing(tmp_path: Path, monkeypatch) -> None:
    def fails(_gguf: Path, staging: Path) -> None:
        (staging / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(smollm2, "_convert", fails)
    with pytest.raises(KeyboardInterrupt):
        smollm2.prepare(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(
        smollm2.ModelPreparationError, match=r"not a finished model folder \(missing: model.safetensors"
    ):
        smollm2.prepare(tmp_path)
    assert (tmp_path / "config.json").read_text() == "{}"


def test_without_the_package(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(smollm2, "PACKAGE", "no_such_package")
    with pytest.raises(smollm2.ModelPreparationError, match=r"pip install 'ppojob\[demo-model\]'"):
        smollm2.prepare(tmp_path / "model")


def test_another_process_that_was_faster_wins(tmp_path: Path, monkeypatch) -> None:
    output = tmp_path / "model"

    def overtaken(_gguf: Path, staging: Path) -> None:
        for folder in (staging, output):
            folder.mkdir(exist_ok=True)
            for name in smollm2.EXPECTED_FILES:
                (folder / name).write_text(folder.name)

    monkeypatch.setattr(smollm2, "_convert", overtaken)
    smollm2.prepare(output)
    assert (output / "config.json").read_text() == "model"
    assert [path.name for path in tmp_path.iterdir()] == ["model"]
