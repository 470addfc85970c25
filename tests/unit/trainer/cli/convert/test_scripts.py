"""Bash evaluates a launch script: what it would have started is recorded, and nothing of it happens."""

from __future__ import annotations

import os
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


MADE: dict[str, tuple[str, dict[str, Any]]] = {
    "if": (f"N=8\nif [ x = y ]; then\n N=1\nfi\n{VERL} trainer.nnodes=$N", {"trainer.nnodes": 8}),
    "case": (f"case gpu in npu) N=1;; *) N=4;; esac\n{VERL} trainer.nnodes=$N", {"trainer.nnodes": 4}),
    "loop": (f"for n in 1 2; do N=$n; done\n{VERL} trainer.nnodes=$N", {"trainer.nnodes": 2}),
    "function": (f'run() {{ {VERL} "$@" a.b=2; }}\nrun c.d=5', {"c.d": 5, "a.b": 2}),
    "array": (f'P=(a.b=2)\nP+=("c.d=a b")\n{VERL} "${{P[@]}}"', {"a.b": 2, "c.d": "a b"}),
    "nested substitution": (f"{VERL} a.b=$(basename $(dirname /a/b/c))", {"a.b": "b"}),
    "arithmetic": (f"L=$((1024 * (1 + 1)))\n{VERL} a.b=$L", {"a.b": 2048}),
    "exec": (f"exec {VERL} a.b=2", {"a.b": 2}),
    "background": (f"{VERL} a.b=2 > run.log 2>&1 &", {"a.b": 2}),
    "folders": (f"set -euo pipefail\nmkdir -p /no/x\ncd /no/x\n{VERL} a.b=2 | tee /no/log", {"a.b": 2}),
    "heredoc": (f"cat > inner.sh <<END\n{VERL} a.b=2\nEND\nbash inner.sh", {"a.b": 2}),
    "ray job submit": (f"ray job submit --no-wait -- {VERL} a.b=2", {"a.b": 2}),
    "uv run": (f"uv run --extra vllm {VERL} a.b=2", {"a.b": 2}),
    "srun": (f"srun --nodes=2 nsys profile {VERL} a.b=2", {"a.b": 2}),
    "bash -c": (f"docker run image bash -c '{VERL} a.b=\"x y\"'", {"a.b": "x y"}),
    "file": ("python verl/trainer/main_ppo.py a.b=2", {"a.b": 2}),
    "home": (f"{VERL} a.b=$HOME/m c.d=$PWD/v", {"a.b": "$HOME/m", "c.d": "./v"}),
    "npu": (f"D=${{D:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}}\n{VERL} a.b=$D", {"a.b": "gpu"}),
    "preparation": (f"python3 prepare/gsm8k.py --local_dir x\nsleep 1000\n{VERL} a.b=2", {"a.b": 2}),
}


@pytest.mark.parametrize("name", MADE)
def test_what_bash_makes_of_a_script(name: str, tmp_path: Path) -> None:
    text, expected = MADE[name]
    settings = settings_of(tmp_path, text)

    assert given(settings) == expected
    assert settings.unconverted == []


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

    [(name, _, why)] = settings.unconverted
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
        ("echo hello", "it does not start verl"),
        ("sbatch inner.sh", r"it does not start verl.*; it starts\n  .*run.sh:1: sbatch inner.sh"),
        (f"set -u\n\n{VERL} trainer.nnodes=$NODES", "run.sh:3: NODES: unbound variable: .* --env NODES=VALUE"),
        (f"echo 'usage: run.sh GPUS'\nexit 1\n{VERL}", "usage: run.sh GPUS: the script ended with 1"),
        (f"N=${{N:?how many nodes}}\n{VERL}", "run.sh:1: N: how many nodes"),
        (f"if true; then\n{VERL}", "run.sh:3: syntax error: unexpected end of file"),
        ("torchrun -m verl.trainer.fsdp_sft_trainer data.train_files=x", "run.sh:1: .*: this is supervised"),
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

    with pytest.raises(ManifestError, match="did not end within 1 s"):
        evaluate(Script(script), best_sandbox(), limit=1)

    assert time.monotonic() - start < 300


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
        remount = "mount -o remount,bind,rw /"
        text = f"PATH=/usr/bin:/bin\n{remount}\nunshare -r -m sh -c '{remount}; rm {kept}'\nrm {kept}\n/bin/rm {kept}"

        self.run(tmp_path, text)

        assert kept.exists()

    def test_there_is_no_network(self, tmp_path: Path) -> None:
        probe = "import socket; print([name for _, name in socket.if_nameindex()])"

        calls = self.run(tmp_path, f'ray "$({sys.executable} -c "{probe}")"')

        assert calls == [["ray", "['lo']"]]

    def test_there_are_no_devices_but_harmless_ones(self, tmp_path: Path) -> None:
        [words] = self.run(tmp_path, "ray $(find -L /dev/ -maxdepth 1 -type b) $(echo x 2>&1 > /dev/null)")

        assert words == ["ray"]

    def test_other_processes_are_out_of_reach(self, tmp_path: Path) -> None:
        [words] = self.run(tmp_path, f"if builtin kill -0 {os.getpid()}; then ray reached; else ray safe; fi")

        assert words == ["ray", "safe"]
