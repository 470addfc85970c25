"""Every launch script of a checkout of verl, converted: a row of a table, beside verl's own configuration of it.

`VERL_CHECKOUT=FOLDER python -m tests.oracles.verl_examples` writes the table again. None of verl's scripts is in this
tree; the table is in `verl_tables/`, one file for a version.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from ppojob_trainer.commands.convert import Conversion, Options, convert
from ppojob_trainer.commands.convert.read import settings_of
from ppojob_trainer.commands.convert.scripts.bash_run import Recording, Script, best_sandbox, evaluate
from ppojob_trainer.commands.convert.scripts.launches import Launch, chosen, launches
from ppojob_trainer.commands.manifest import ManifestError
from tests.environments import OwnEnvironment, run
from tests.oracles.environments import HERE

TABLES = HERE / "verl_tables"
COLUMNS = (
    "script", "outcome", "train_batch", "mini_batch", "prompt", "response", "learning_rate", "estimator", "gpus",
    "pools", "reasons",
)  # fmt: skip
# The machine may be busy, and a script takes a process for each program.
LIMIT_SECONDS = 300.0
COMPOSE_LIMIT_SECONDS = 3000


# What a script does not run without: its arguments, and its variables.
_SFT_ARGUMENTS = ("8", "output")
NEEDS: Mapping[str, Mapping[str, str]] = {
    "examples/gspo_trainer/run_qwen3_32b_gspo_npu.sh": {"sp_size": "4"},
    "examples/gspo_trainer/test_gspo_3b_math.sh": {"SLURM_JOB_NUM_NODES": "1"},
    "examples/gspo_trainer/test_gspo_3b_math_slurm.sh": {"SLURM_JOB_NUM_NODES": "1"},
    "examples/gspo_trainer/test_gspo_qwen30b_a3b_ep.sh": {"HDFS_ROOT": "/data", "DATA_ROOT": "/data"},
    "examples/grpo_trainer/run_deepseek_v4_flash_megatron.sh": {"HDFS_ROOT": "/data", "DATA_ROOT": "/data"},
    "examples/grpo_trainer/run_deepseek_v4_veomni.sh": {"HDFS_ROOT": "/data", "DATA_ROOT": "/data"},
    "examples/grpo_trainer/run_kimi_k2_6_glm5_1_megatron_lite.sh": {"MODEL_PATH": "/data/models/actor"},
    "examples/grpo_trainer/run_nemotron_nano_v3_30b_a3b_megatron.sh": {"RAY_DATA_HOME": "/data"},
    "examples/grpo_trainer/run_qwen3_vl_30b_a3b_fsdp.sh": {"INFER_BACKEND": "vllm"},
    "examples/sft/gsm8k/run_deepseek_v4_megatron_lite.sh": {"MODEL_PATH": "/data/models/actor"},
    "examples/sft/gsm8k/run_nemotron_nano_v3_megatron.sh": {"ckpts_home": "/data"},
    "examples/tuning/lora/run_qwen3_8b_from_adapter_fsdp.sh": {"LORA_ADAPTER_PATH": "/data/adapter"},
}


def checkout() -> Path | None:
    """Return the folder of verl's sources that VERL_CHECKOUT names."""
    given = os.environ.get("VERL_CHECKOUT")
    return Path(given).resolve() if given else None


@dataclass(frozen=True)
class Example:
    """A script of a checkout, and what becomes of it."""

    root: Path
    name: str

    @cached_property
    def script(self) -> Script:
        """What is evaluated."""
        arguments = _SFT_ARGUMENTS if self.name.startswith("examples/sft/") else ()
        return Script(self.root / self.name, arguments, NEEDS.get(self.name, {}), shown_as=self.name)

    @cached_property
    def recording(self) -> Recording | ManifestError:
        """The value after bash evaluated it."""
        try:
            return evaluate(self.script, best_sandbox(), LIMIT_SECONDS)
        except ManifestError as error:
            return error

    @cached_property
    def conversion(self) -> Conversion | ManifestError:
        """The PPOJob, or why there is none."""
        if isinstance(self.recording, ManifestError):
            return self.recording
        try:
            return convert(settings_of(self.script, self.recording, Options()))
        except ManifestError as error:
            return error

    @property
    def is_valid(self) -> bool:
        """Whether there is a PPOJob that passes its checks."""
        return isinstance(self.conversion, Conversion) and self.conversion.is_valid

    @cached_property
    def launch(self) -> Launch:
        """The launch as it was recorded, with the folder in which it ran taken for the checkout."""
        assert isinstance(self.recording, Recording)
        found = chosen(launches(self.recording.calls), None, self.name)
        words = [word.replace(self.recording.folder, str(self.root)) for word in found.words if word.strip()]
        return replace(found, words=[word.replace(self.recording.home, "$HOME") for word in words])

    def row(self) -> dict[str, str]:
        """Return the row of the table."""
        if isinstance(self.conversion, ManifestError):
            reason = str(self.conversion).removeprefix(f"{self.name}:").strip()
            return {column: "" for column in COLUMNS} | {"script": self.name, "outcome": "refused", "reasons": reason}
        spec = self.conversion.manifest["spec"]
        unconverted = [entry.name for entry in self.conversion.unconverted]
        outcome = ("converted in part" if unconverted else "converted") if self.conversion.is_valid else "invalid"
        pools = spec.get("pools", [])
        found = {
            "train_batch": spec["data"].get("trainBatchSize"),
            "mini_batch": spec.get("actor", {}).get("miniBatchSize"),
            "prompt": spec["data"].get("maxPromptLength"),
            "response": spec["data"].get("maxResponseLength"),
            "learning_rate": spec.get("actor", {}).get("learningRate"),
            "estimator": spec.get("algorithm", {}).get("advantageEstimator"),
            "gpus": sum(pool["nodes"] * pool["gpusPerNode"] for pool in pools),
            "pools": " ".join(pool["name"] for pool in pools),
            "reasons": " ".join(dict.fromkeys(unconverted)),
        }
        texts = {name: "" if value is None else str(value) for name, value in found.items()}
        return {"script": self.name, "outcome": outcome, **texts}

    def composition(self) -> dict[str, Any]:
        """Return what Hydra is to compose for the launch."""
        options = {"config-name": self.launch.program.config, "config-path": ""}
        overrides = []
        words = iter(self.launch.words)
        for word in words:
            name = word.lstrip("-").partition("=")[0]
            if word.startswith("--") and name in options:
                options[name] = word.partition("=")[2] if "=" in word else next(words)
            else:
                overrides.append(word)
        folder = Path(options["config-path"])
        if not folder.is_absolute():
            is_split = self.launch.program.splits
            folder = self.script.path.parent / "config" if is_split else self.root / "verl" / "trainer" / "config"
        cwd = self.script.path.parent if self.launch.program.splits else self.root
        name = options["config-name"].removesuffix(".yaml")
        return {"folder": str(folder), "name": name, "overrides": overrides, "cwd": str(cwd)}


def version_of(root: Path) -> str:
    """Return the version of the sources."""
    return (root / "verl" / "version" / "version").read_text().strip()


def examples_of(root: Path) -> list[Example]:
    """Return the scripts below `examples`."""
    return [Example(root, str(path.relative_to(root))) for path in sorted((root / "examples").rglob("*.sh"))]


def reviewed(version: str) -> list[dict[str, str]] | None:
    """Return the rows of a version's table, None where there is none."""
    file = TABLES / f"{version}.csv"
    if not file.exists():
        return None
    with file.open(encoding="utf-8", newline="") as text:
        return list(csv.DictReader(text))


def composed(examples: list[Example], folder: Path) -> list[dict[str, Any]]:
    """Return verl's own configuration for each script that is converted."""
    given, answered = folder / "launches.json", folder / "answers.json"
    given.write_text(json.dumps([example.composition() for example in examples]), encoding="utf-8")
    python = OwnEnvironment("oracles", "verl", HERE / "verl-requirements.txt").python()
    run([python, HERE / "verl_compose_oracle.py", given, answered], COMPOSE_LIMIT_SECONDS)
    # As in the conversion, where the folder in which the script ran is `.`.
    text = answered.read_text(encoding="utf-8").replace(f"{examples[0].root}/", "./")
    answers: list[dict[str, Any]] = json.loads(text)
    return answers


def main() -> None:
    """Write the table of the checkout's version."""
    root = checkout()
    if root is None:
        raise SystemExit("VERL_CHECKOUT is not set: the folder of verl's sources")
    TABLES.mkdir(exist_ok=True)
    with (TABLES / f"{version_of(root)}.csv").open("w", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(example.row() for example in examples_of(root))


if __name__ == "__main__":
    main()
