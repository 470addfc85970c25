"""The benchmark of the host's memory: its jobs are valid, and each phase has its own peak."""

import argparse
from pathlib import Path

import pytest

from ppojob_trainer.telemetry.trace import Span
from tests.bench import workload
from tests.bench.bench_host_memory import CRITICS, _job
from tests.bench.host_memory import largest, peaks, sampled, total
from tests.bench.measurement import spec_of

GB = 10**9


@pytest.mark.parametrize("critic", sorted(CRITICS))
@pytest.mark.parametrize("device", ["CUDA", "CPU"])
def test_a_job_is_valid(tmp_path: Path, critic: str, device: str) -> None:
    arguments = argparse.Namespace(gpus=2, steps=3, device=device, critic=critic, set=["actor.maxTokensPerGPU=16384"])

    spec = spec_of(_job(tmp_path, workload.Size("7B"), arguments))

    assert spec.model.actor.offload.optimizer == (device == "CUDA")
    assert spec.algorithm.needs_critic == (critic != "none")
    assert (spec.model.critic.lora is not None) == (critic == "lora")
    assert spec.data.train_batch_size * spec.rollout.samples_per_prompt == workload.NUM_PROMPTS
    assert spec.actor.max_tokens_per_gpu == 16384


def test_each_phase_has_its_peak(tmp_path: Path) -> None:
    rows = [(1.0, 90), (2.0, 60), (3.0, 40), (4.0, 70)]
    lines = [f"{at},{100 * GB},{free * GB}" for at, free in rows]
    (tmp_path / "memory.csv").write_text("\n".join(["time,MemTotal,MemAvailable", *lines]))
    spans = [Span("generate", "all", "rollout", 1, 1.5, 3.5), Span("save_checkpoint", "all", "actor", 1, 2.5, 3.5)]

    found = {peak.phase: (peak.used // GB, peak.at) for peak in peaks(tmp_path, spans)}

    assert found == {"no phase": (30, 4.0), "step 1 generate": (60, 3.0), "step 1 save_checkpoint": (60, 3.0)}
    assert total(tmp_path) == 100 * GB


def test_this_process_is_sampled(tmp_path: Path) -> None:
    held = bytearray(150 * 10**6)

    with sampled(tmp_path, 0.1):
        pass

    (peak,) = peaks(tmp_path, [])
    assert 0 < peak.used <= total(tmp_path)
    assert any(rss >= len(held) for _, rss in largest(tmp_path, peak.at))
