"""The settings for verl and the parsing of its output, with programs that replace it."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from rich.console import Console

from ppojob_api.v1alpha1.spec import PPOJobSpec
from tests.bench import bench_split, report, verl_run, workload
from tests.bench.layouts import layout
from tests.bench.measurement import Result, Run, spec_of
from tests.bench.verl_attention import flash_attn_2_cuda
from tests.bench.verl_run import NoVerlError, Verl, find, measure_verl, read
from tests.bench.verl_settings import COLOCATED, ONE_STEP_OFF, Schedule, overrides, schedules

TINY = workload.Size("tiny", 8, 16, 16, 512)
# Of verl 0.9.1: `FileLogger.log` writes the step and all metrics as orjson does, and what is not finite as null.
LINE = (
    '{{"step":{step},"data":{{"global_seqlen/min":82176,"actor/entropy":11.93,"perf/mfu/actor":0.16,'
    '"critic/vf_explained_var":null,"training/global_step":{step},"timing_s/gen":{gen},"timing_s/old_log_prob":0.64,'
    '"timing_s/ref":0.63,"timing_s/values":0.46,"timing_s/adv":0.05,"timing_s/update_critic":1.75,'
    '"timing_s/update_actor":2.2,"timing_s/update_weights":0.5,"timing_s/step":{total},"perf/throughput":9012.5}}}}\n'
)
PREPARE = f"""#!{sys.executable}
import json, os, subprocess, sys, time
if sys.argv[1] == "-c":
    print(json.dumps([[], "0.9.1"]))
    sys.exit()
"""
STEPS = "".join(LINE.format(step=step, gen=2.4, total=9.2) for step in range(1, 6))


def job(folder: Path, size: workload.Size = TINY, gpus: int = 2) -> PPOJobSpec:
    return spec_of(workload.job(folder, size, layout("colocated", gpus), 5, "CUDA"))


def program(folder: Path, text: str) -> str:
    file = folder / "python"
    file.write_text(text, encoding="utf-8")
    file.chmod(0o755)
    return str(file)


def settings(spec: PPOJobSpec, size: workload.Size, schedule: Schedule = COLOCATED) -> dict[str, Any]:
    found = [one.split("=", 1) for one in overrides(spec, size, Path("/w/prompts.parquet"), Path("/w/verl"), schedule)]
    return {name: json.loads(value) for name, value in found}


def test_its_settings_are_those_of_the_job() -> None:
    found = settings(job(Path("/w"), workload.Size(), 4), workload.Size())

    wanted = {
        "trainer.n_gpus_per_node": 4,
        "trainer.total_training_steps": 5,
        "data.train_batch_size": 256,
        "data.max_prompt_length": 130,
        "data.max_response_length": 512,
        "actor_rollout_ref.rollout.ignore_eos": True,
        "actor_rollout_ref.rollout.max_model_len": 642,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 64,
        "critic.ppo_mini_batch_size": 64,
        "algorithm.adv_estimator": "gae",
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.model.path": "/w/model",
        "reward.custom_reward_function.path": "/w/reward.py",
        "trainer.logger": ["console", "file"],
        "hydra.output_subdir": None,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_what_is_set_for_our_layouts_is_set_for_it() -> None:
    raw = workload.job(Path("/w"), TINY, layout("colocated", 2), 5, "CUDA")
    raw["spec"]["model"]["actor"]["gradientCheckpointing"] = False
    raw["spec"]["actor"]["maxTokensPerGPU"] = 16_384

    found = settings(spec_of(raw), TINY)

    assert found["actor_rollout_ref.model.enable_gradient_checkpointing"] is False
    assert found["critic.model.enable_gradient_checkpointing"] is True
    assert found["actor_rollout_ref.actor.ppo_max_token_len_per_gpu"] == 16_384
    assert found["+critic.ppo_infer_max_token_len_per_gpu"] == 49_152


def grpo(gpus: int) -> PPOJobSpec:
    raw = workload.job(Path("/w"), TINY, layout("colocated", gpus), 5, "CUDA")
    raw["spec"]["algorithm"] = {"advantageEstimator": "GRPO", "kl": {"inLoss": True}}
    raw["spec"]["rollout"]["samplesPerPrompt"] = 8
    return spec_of(raw)


def test_grpo_has_groups_and_the_kl_in_the_loss() -> None:
    found = settings(grpo(2), TINY)

    wanted = {
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "actor_rollout_ref.actor.use_kl_loss": True,
        "actor_rollout_ref.rollout.n": 8,
        "data.train_batch_size": 8,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
    }
    assert {name: found[name] for name in wanted} == wanted


def test_one_step_off_has_half_of_the_gpus_for_generation() -> None:
    found = settings(grpo(4), TINY, ONE_STEP_OFF)

    gpus = {name: value for name, value in found.items() if name.endswith(("n_gpus_per_node", "hybrid_engine"))}
    assert gpus == {
        "trainer.n_gpus_per_node": 2,
        "rollout.n_gpus_per_node": 2,
        "actor_rollout_ref.hybrid_engine": False,
    }


@pytest.mark.parametrize(
    ("spec", "names"),
    [
        (job(Path("/w")), ["verl.trainer.main_ppo"]),
        (grpo(1), ["verl.trainer.main_ppo"]),
        (grpo(2), ["verl.trainer.main_ppo", "verl.experimental.one_step_off_policy.main_ppo"]),
    ],
)
def test_it_trains_one_step_off_where_generation_has_gpus_of_its_own_and_no_critic(
    spec: PPOJobSpec, names: list[str]
) -> None:
    assert [schedule.module for schedule in schedules(spec)] == names


@pytest.mark.parametrize(("shape", "backend"), [("tiny", "torch"), ("0.5B", "triton"), ("1.5B", "triton")])
def test_its_triton_kernel_is_taken_where_the_width_allows_it(shape: str, backend: str) -> None:
    found = settings(job(Path("/w")), workload.Size(shape))

    assert found["actor_rollout_ref.model.fused_kernel_options.impl_backend"] == backend


def test_it_never_asks_for_fewer_cores_than_its_actors_want(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)

    assert settings(job(Path("/w")), TINY)["ray_kwargs.ray_init.num_cpus"] == 18


def test_prompts_are_a_table_of_the_same_rows(tmp_path: Path) -> None:
    row = {"data_source": "w", "prompt": [{"role": "user", "content": "abc"}], "extra_info": {"index": 0}}
    (tmp_path / "prompts.jsonl").write_text(f"{json.dumps(row)}\n" * 3, encoding="utf-8")

    verl_run.write_prompts(job(tmp_path), tmp_path / "prompts.parquet")

    assert pyarrow.parquet.read_table(tmp_path / "prompts.parquet").to_pylist() == [row] * 3


def test_a_run_is_what_its_file_logger_wrote_after_the_warm_up(tmp_path: Path) -> None:
    lines = [
        LINE.format(step=step, gen=20.0 if step < 4 else step, total=40.0 if step < 4 else 9.0) for step in range(1, 7)
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(lines), encoding="utf-8")
    (tmp_path / "finished.json").write_text('{"first_step_s": 150.0}', encoding="utf-8")

    run = read("verl 0.9.1", tmp_path)

    assert (run.name, run.first_step_s, run.step_s, len(run.steps)) == ("verl 0.9.1", 150.0, 9.0, 3)
    assert (run.metrics["timing_s/gen"], run.metrics["perf/mfu/actor"]) == (5.0, 0.16)
    assert "critic/vf_explained_var" not in run.metrics


def test_it_is_beside_ours_in_the_table() -> None:
    phases = {"timing_s/gen": 2.0, "timing_s/update_actor": 1.5, "timing_s/step": 4.6, "perf/throughput": 300.0}
    ours = Result("colocated", 100.0, [phases], job(Path("/w")), 0.01)
    theirs = {"timing_s/gen": 2.5, "timing_s/step": 9.2, "perf/throughput": 100.0}
    console = Console(width=150, record=True)

    console.print(report.table([ours, Run("verl 0.9.1", 150.0, [theirs])], TINY, {}))

    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:4]] for cells in _cells(console.export_text())}
    assert rows["gen"] == ["2.000", "2.500"]
    assert rows["update_actor"] == ["1.500", "-"]
    assert rows["ratio to colocated, seconds"] == ["1.000", "2.000"]
    assert rows["tokens/s per GPU"] == ["300", "100"]
    assert rows["ratio to colocated, tokens/s"] == ["1", "0.3333"]
    assert rows["no phase in any pool, share of the time"] == ["1.00%", "-"]
    assert rows["start to first step, s"] == ["100.0", "150.0"]


def _cells(text: str) -> list[list[str]]:
    return [line.replace("┃", "│").split("│") for line in text.splitlines() if "│" in line]


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (f'#!{sys.executable}\nprint(\'[["verl", "flash_attn"], null]\')\n', "it has no verl, no flash_attn"),
        ("#!/bin/sh\necho 'ImportError: no ray' >&2\nexit 1\n", "ImportError: no ray"),
        (None, "No such file"),
    ],
)
def test_an_interpreter_without_it_is_named(tmp_path: Path, text: str | None, reason: str) -> None:
    python = str(tmp_path / "none") if text is None else program(tmp_path, text)

    with pytest.raises(NoVerlError, match=reason) as caught:
        find(python)

    assert f"{python} cannot run verl" in str(caught.value)
    assert "pip install verl==0.9.1" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--verl", "/none/python"], "--verl: /none/python cannot run verl"),
        (["--verl", "--device", "CPU"], "with --device CUDA alone"),
    ],
)
def test_the_benchmark_refuses_before_it_measures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: list[str], message: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(sys, "argv", ["bench_split", "--output", "out", *options])

    with pytest.raises(SystemExit):
        bench_split._arguments()

    assert message in capsys.readouterr().err


def test_what_it_leaves_running_is_ended_and_its_run_is_not_repeated(tmp_path: Path) -> None:
    left, data = tmp_path / "left", tmp_path / "data"
    data.mkdir()
    (data / "prompts.jsonl").write_text('{"prompt": []}\n', encoding="utf-8")
    text = f"""
child = subprocess.Popen(["sleep", "3600"], start_new_session=False)
with open({str(left)!r}, "w") as file:
    file.write(str(child.pid))
with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
    file.write({STEPS!r})
"""
    verl = find(program(tmp_path, PREPARE + text))

    run = measure_verl(verl, job(data), TINY, tmp_path / "verl")

    assert (run.name, run.step_s) == ("verl 0.9.1", 9.2)
    assert 0 < run.first_step_s < 300
    assert not _is_alive(int(left.read_text()))
    left.unlink()
    assert measure_verl(verl, job(data), TINY, tmp_path / "verl") == run
    assert not left.exists()


def _is_alive(pid: int) -> bool:
    for _ in range(600):
        try:
            state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return False
        if state == "Z":
            return False
        time.sleep(0.1)
    return True


@pytest.mark.parametrize(
    ("text", "limit", "reason"),
    [
        ("print('no memory'); sys.exit(3)", 500.0, "ended with 3: see .*log.txt\nno memory"),
        ("time.sleep(60)", 1.0, "was not done after 1 s: see .*log.txt"),
    ],
)
def test_a_run_that_fails_says_so_with_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: float, reason: str
) -> None:
    (tmp_path / "prompts.jsonl").write_text('{"prompt": []}\n', encoding="utf-8")
    monkeypatch.setattr(verl_run, "RUN_LIMIT_S", limit)

    with pytest.raises(RuntimeError, match=f"verl 0.9.1 {reason}"):
        measure_verl(Verl(program(tmp_path, PREPARE + text), "0.9.1"), job(tmp_path), TINY, tmp_path / "verl")


def test_attention_that_torch_does_not_have_is_refused() -> None:
    some = torch.zeros(1)
    arguments = [None, None, None, None, 1, 1, 0.0, 1.0, False, True, -1, -1]

    with pytest.raises(NotImplementedError, match="softcap is not supported here"):
        flash_attn_2_cuda.varlen_fwd(some, some, some, None, some, some, *arguments, 30.0, False, None)
    with pytest.raises(NotImplementedError, match="only packed sequences"):
        flash_attn_2_cuda.fwd(some)
