"""Bash evaluates a launch script: what it would have started is recorded, and nothing of it happens."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ppojob_trainer.commands.convert.read import Options, Settings, read
from ppojob_trainer.commands.convert.scripts.bash_run import Sandbox, Script, best_sandbox, evaluate
from ppojob_trainer.commands.manifest import ManifestError

VERL = "python3 -m verl.trainer.main_ppo data.train_files=/data/a.parquet"
needs_sandbox = pytest.mark.skipif(
    best_sandbox() is Sandbox.NONE, reason="neither bwrap nor unshare works on this machine"
)


def settings_of(folder: Path, text: str, *arguments: str, **options: Any) -> Settings:
    script = folder / "run.sh"
    script.write_text(text)
    return read([str(script), *arguments], Options(runs=True, limit=120, **options))


def given(settings: Settings) -> dict[str, Any]:
    return {name: value for name, value in settings.values.items() if name != "data.train_files"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"B=1024\nif [ x = y ]; then\n B=16\nfi\n{VERL} data.train_batch_size=$B", {"data.train_batch_size": 1024}),
        (f"case gpu in npu) B=16;; *) B=64;; esac\n{VERL} data.train_batch_size=$B", {"data.train_batch_size": 64}),
        (f'run() {{ {VERL} "$@" trainer.nnodes=2; }}\nrun trainer.save_freq=5', {"trainer.save_freq": 5, "trainer.nnodes": 2}),
        (f'P=(trainer.nnodes=2)\nP+=("trainer.project_name=a b")\n{VERL} "${{P[@]}}"', {"trainer.nnodes": 2, "trainer.project_name": "a b"}),
        (f"{VERL} trainer.project_name=$(basename $(dirname /a/b/c))", {"trainer.project_name": "b"}),
        (f"L=$((1024 * (1 + 1)))\n{VERL} data.max_response_length=$L", {"data.max_response_length": 2048}),
        (f"for n in 1 2; do N=$n; done\n{VERL} trainer.nnodes=$N", {"trainer.nnodes": 2}),
        (f"exec {VERL} trainer.nnodes=2", {"trainer.nnodes": 2}),
        (f"{VERL} trainer.nnodes=2 > run.log 2>&1 &", {"trainer.nnodes": 2}),
        (f"set -euo pipefail\nmkdir -p /no/such/folder\ncd /no/such/folder\n{VERL} trainer.nnodes=2 | tee /no/log", {"trainer.nnodes": 2}),
        (f"cat > inner.sh <<END\n{VERL} trainer.nnodes=2\nEND\nbash inner.sh", {"trainer.nnodes": 2}),
        (f"ray job submit --no-wait -- {VERL} trainer.nnodes=2", {"trainer.nnodes": 2}),
        (f"uv run --extra vllm {VERL} trainer.nnodes=2", {"trainer.nnodes": 2}),
        (f"srun --nodes=2 nsys profile {VERL} trainer.nnodes=2", {"trainer.nnodes": 2}),
        ("python verl/trainer/main_ppo.py trainer.nnodes=2", {"trainer.nnodes": 2}),
        (f"{VERL} actor_rollout_ref.model.path=$HOME/m data.val_files=$PWD/v.parquet", {"actor_rollout_ref.model.path": "$HOME/m", "data.val_files": "v.parquet"}),
        (f"D=${{D:-$(python3 -c 'import torch_npu' && echo npu || echo cuda)}}\n{VERL} trainer.device=$D", {"trainer.device": "cuda"}),
        (f"python3 examples/data_preprocess/gsm8k.py --local_dir x\nsleep 1000\n{VERL} trainer.nnodes=2", {"trainer.nnodes": 2}),
    ],
    ids=lambda value: re.sub(r"\W+", "-", value)[:40] if isinstance(value, str) else "",
)  # fmt: skip
def test_what_bash_makes_of_a_script(text: str, expected: dict[str, Any], tmp_path: Path) -> None:
    settings = settings_of(tmp_path, text)

    assert given(settings) == expected
    assert settings.lost == []


def test_a_script_has_arguments_and_variables(tmp_path: Path) -> None:
    text = f'set -u\n{VERL} trainer.nnodes=$NODES "$@"'

    settings = settings_of(tmp_path, text, "trainer.save_freq=5", environment={"NODES": "3"})

    assert given(settings) == {"trainer.nnodes": 3, "trainer.save_freq": 5}


def test_the_variables_of_the_caller_do_not_reach_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "secret")

    settings = settings_of(tmp_path, f"{VERL} trainer.project_name=${{WANDB_API_KEY:-none}}")

    assert given(settings) == {"trainer.project_name": "none"}


def test_a_value_that_a_program_should_have_printed_is_reported(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, f"\nN=$(python -c 'print(2)')\n{VERL} trainer.nnodes=${{N:-1}}")

    [(name, _, why)] = settings.lost
    assert name == f"{tmp_path}/run.sh:2: python -c print(2)"
    assert "--env" in why


def test_what_was_not_started_is_listed_with_its_line(tmp_path: Path) -> None:
    settings = settings_of(tmp_path, f"conda activate verl\nhf download a/b\nsource /no/env.sh\n{VERL} a.b=1")

    at = f"{tmp_path}/run.sh"
    assert list(settings.notes[1:]) == [
        f"{at}:1: not started: conda activate verl",
        f"{at}:2: not started: hf download a/b",
        f"{at}:3: bash reported: /no/env.sh: No such file or directory",
    ]


class TestSeveralLaunches:
    TEXT = f"{VERL} trainer.nnodes=1\n\npython3 -m verl.trainer.main_ppo trainer.nnodes=2 data.seed=3"

    def test_are_refused_and_listed(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match="starts verl 2 times: choose one with --launch N") as refused:
            settings_of(tmp_path, self.TEXT)

        assert f"\n  2: {tmp_path}/run.sh:3: verl.trainer.main_ppo" in str(refused.value)

    def test_one_is_chosen_by_its_number(self, tmp_path: Path) -> None:
        assert given(settings_of(tmp_path, self.TEXT, launch=2)) == {"trainer.nnodes": 2, "data.seed": 3}

    def test_a_number_that_is_none_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(ManifestError, match="--launch 3: it starts verl 2 times"):
            settings_of(tmp_path, self.TEXT, launch=3)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("echo hello", "nothing in it starts verl"),
        (f"set -u\n\n{VERL} trainer.nnodes=$NODES", "run.sh:3: NODES: unbound variable: .* --env NODES=VALUE"),
        (f"echo 'usage: run.sh GPUS'\nexit 1\n{VERL}", "usage: run.sh GPUS: the script ended with 1"),
        (f"N=${{N:?how many nodes}}\n{VERL}", "run.sh:1: N: how many nodes"),
        (f"if true; then\n{VERL}", "run.sh:3: syntax error: unexpected end of file"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x", "run.sh:1: .*: this is supervised fine-tuning"),
        ("python3 -m verl.trainer.main_generation data.path=x", "this generates responses without training"),
        ("python -m verl.experimental.fully_async_policy.fully_async_main a.b=1", "a synchronous script"),
    ],
)  # fmt: skip
def test_a_script_without_a_launch_is_refused_with_line_and_remedy(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=message):
        settings_of(tmp_path, text)


@pytest.mark.parametrize(
    "text", ["while true; do :; done", "read line < <(tail -f /dev/null)", "tail -f /dev/null & wait"]
)
def test_a_script_that_hangs_is_ended_at_the_limit(text: str, tmp_path: Path) -> None:
    script = tmp_path / "run.sh"
    script.write_text(text)
    start = time.monotonic()

    with pytest.raises(ManifestError, match="did not end within 3 s"):
        evaluate(Script(script), best_sandbox(), limit=3)

    assert time.monotonic() - start < 60


def test_without_a_sandbox_the_programs_are_recorded_too(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.touch()
    script = tmp_path / "run.sh"
    script.write_text(f"rm -f {kept}\nmkdir {tmp_path}/made\n{VERL} a.b=1 &")

    recording = evaluate(Script(script), Sandbox.NONE, limit=120)

    assert [call.words[0] for call in recording.calls] == ["rm", "mkdir", "python3"]
    assert kept.exists()
    assert not (tmp_path / "made").exists()


@needs_sandbox
class TestSandbox:
    def run(self, folder: Path, text: str, arguments: Sequence[str] = ()) -> list[Sequence[str]]:
        script = folder / "run.sh"
        script.write_text(text)
        return [call.words for call in evaluate(Script(script, arguments), best_sandbox(), limit=120).calls]

    def test_nothing_outside_is_deleted_or_written(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        kept.write_text("mine")
        attempts = [
            f"rm -rf {kept}",
            f"echo his > {kept}",
            f"touch {tmp_path}/new",
            f"/bin/rm -f {kept}",
            f"ray {kept}",
        ]

        calls = self.run(tmp_path, "\n".join(attempts))

        assert calls == [["ray", str(kept)]], "it ran to its end"
        assert kept.read_text() == "mine"
        assert sorted(path.name for path in tmp_path.iterdir()) == ["kept", "run.sh"]

    def test_the_file_system_cannot_be_made_writable_again(self, tmp_path: Path) -> None:
        kept = tmp_path / "kept"
        kept.write_text("mine")
        commands = ["mount -o remount,bind,rw /", f"unshare -r -m sh -c 'mount -o remount,bind,rw /; rm {kept}'"]

        self.run(
            tmp_path, "\n".join([f"PATH=/usr/bin:/bin:/sbin {command}" for command in commands] + [f"/bin/rm {kept}"])
        )

        assert kept.exists()

    def test_there_is_no_network(self, tmp_path: Path) -> None:
        probe = "import socket; print([name for _, name in socket.if_nameindex()])"

        calls = self.run(tmp_path, f'ray "$({sys.executable} -c "{probe}")"')

        assert calls == [["ray", "['lo']"]]

    def test_there_are_no_devices_but_harmless_ones(self, tmp_path: Path) -> None:
        [words] = self.run(tmp_path, "ray $(find -L /dev/ -maxdepth 1 -type b) $(echo x 2>&1 > /dev/null)")

        assert words == ["ray"]

    def test_other_processes_are_out_of_reach(self, tmp_path: Path) -> None:
        [words] = self.run(
            tmp_path, f"ray $(builtin kill -0 {time.time_ns() and __import__('os').getpid()} 2>&1 | wc -l)"
        )

        assert words == ["ray", "1"]
