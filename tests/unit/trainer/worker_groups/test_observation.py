"""What is seen of a process: its GPU by NVML (a driver of our own), profiles, hanging calls, samples of responses."""

import gzip
import json
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_api.v1alpha1.telemetry import ProfileSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.protocol import DataProto, Keys, Ragged, rollout_batch
from ppojob_trainer.telemetry import CurrentPhase, current_phase, within_phase
from ppojob_trainer.worker_groups.gpu_sampler import GpuSampler, GpuUse
from ppojob_trainer.worker_groups.observation import Moved, Observed, observed_metrics
from ppojob_trainer.worker_groups.profiling import Profiler
from ppojob_trainer.worker_groups.samples import SampleKeeper
from ppojob_trainer.worker_groups.worker_process import WorkerContext

RAW: dict[str, Any] = {
    "image": "i",
    "model": {"actor": {"path": "/m"}},
    "data": {"train": {"reasoningGym": {"task": "products"}}, "trainBatchSize": 256},
    "reward": {"function": {"module": "r"}},
    "pools": [{"name": "actor", "gpusPerNode": 1}],
    "placement": {"actor": "actor"},
    "storage": {"claimName": "c"},
}


def _phase(step: int) -> CurrentPhase:
    return CurrentPhase("update_actor", "actor", step, deadline=time.time() + 60)


def test_metrics_of_a_step_are_the_largest_over_ranks_and_the_mean_over_samples() -> None:
    observed = [
        Observed("actor", 3, allocated_peak_bytes=2 * 10**9, gpu=GpuUse(8 * 10**9, 80 * 10**9, 0.5, 1)),
        Observed("actor", 3, allocated_peak_bytes=3 * 10**9, gpu=GpuUse(7 * 10**9, 80 * 10**9, 3.0, 3)),
        Observed("actor", 3, reserved_peak_bytes=5 * 10**9),
        Observed("rollout", 3, allocated_peak_bytes=None, gpu=GpuUse(20 * 10**9)),
        Observed("critic", 3, allocated_peak_bytes=10**9, gpu=None),
        Observed("reward", 3),
        Observed("mine", 3, gpu=GpuUse(10**12, 10**12, 1.0, 1)),
    ]

    assert observed_metrics(observed, {"actor": "a", "rollout": "a", "critic": "c", "reward": "c"}) == {
        "perf/max_memory_allocated_gb/actor": 3.0,
        "perf/max_memory_allocated_gb/critic": 1.0,
        "perf/max_memory_reserved_gb/actor": 5.0,
        "pool/a/memory_peak_gb": 20.0,
        "pool/a/memory_total_gb": 80.0,
        "pool/a/gpu_utilization": 0.875,
    }


def test_what_a_phase_moved_is_the_slowest_rank_and_all_bytes() -> None:
    observed = [
        Observed("actor", 3, phase="old_log_prob", moved=Moved(0.25, 2_000_000, 500_000)),
        Observed("actor", 3, phase="old_log_prob", moved=Moved(0.5, 1_000_000)),
        Observed("actor", 3, phase="update_weights"),
    ]

    assert observed_metrics(observed, {"actor": "a"}) == {
        "comm_s/old_log_prob": 0.5,
        "comm_mb/old_log_prob": 3.0,
        "comm_stored_mb/old_log_prob": 0.5,
    }


def test_on_cpu_there_is_nothing_to_see() -> None:
    assert observed_metrics([Observed("actor", 1), Observed("reward", 1)], {"actor": "a"}) == {}
    assert GpuSampler.open([]) is None


class _Nvml(types.ModuleType):
    """NVML with one GPU, whose memory is what a test says."""

    class NVMLError(Exception):
        pass

    def __init__(self, *, tells_utilization: bool = True) -> None:
        super().__init__("pynvml")
        self.used = 5
        self.opened: list[Any] = []
        self._tells_utilization = tells_utilization

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        if index > 7:
            raise self.NVMLError("not found")
        self.opened.append(index)
        return "handle"

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        self.opened.append(uuid)
        return "handle"

    def nvmlDeviceGetMemoryInfo(self, handle: str) -> Any:
        return types.SimpleNamespace(used=self.used, total=10)

    def nvmlDeviceGetUtilizationRates(self, handle: str) -> Any:
        if not self._tells_utilization:
            raise self.NVMLError("not supported")
        return types.SimpleNamespace(gpu=50)


def test_the_peak_counts_from_one_taking_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    sampler = GpuSampler.open([3])
    assert sampler is not None
    nvml.used = 9
    sampler._sample()
    nvml.used = 4

    first, second = sampler.take(), sampler.take()

    assert (first.memory_peak_bytes, second.memory_peak_bytes) == (9, 4)
    assert first.utilization_sum == first.num_utilizations / 2
    assert nvml.opened == [3]


def test_a_part_of_a_gpu_has_a_memory_and_no_utilization(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = _Nvml(tells_utilization=False)
    monkeypatch.setitem(sys.modules, "pynvml", nvml)

    sampler = GpuSampler.open(["MIG-1"])

    assert sampler is not None
    assert sampler.take() == GpuUse(5, 10, 0.0, 0)
    assert nvml.opened == ["MIG-1"]


def test_a_gpu_that_nvml_does_not_know_has_no_sampler(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", _Nvml())

    assert GpuSampler.open([8]) is None
    assert "NVML does not know GPU 8" in caplog.text


def test_a_call_of_a_chosen_step_is_profiled_and_no_other(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    profiler = Profiler("actor-rank1", ProfileSpec(steps=[2], memory=True), tmp_path / "profile")
    for phase in (_phase(1), None):
        with profiler.around("update_actor", phase):
            torch.ones(4, 4) @ torch.ones(4, 4)
    assert not (tmp_path / "profile").exists()

    with profiler.around("update_actor", _phase(2)):
        torch.ones(4, 4) @ torch.ones(4, 4)

    (file,) = (tmp_path / "profile").iterdir()
    assert file.name == "actor-rank1-step2-update_actor.json.gz"
    names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
    assert "aten::mm" in names
    assert "no memory snapshot: this process uses no GPU" in caplog.text


def test_a_profiled_call_that_fails_leaves_its_profile_and_its_error(tmp_path: Path) -> None:
    profiler = Profiler("actor-rank0", ProfileSpec(steps=[1]), tmp_path)

    with pytest.raises(ZeroDivisionError), profiler.around("update_actor", _phase(1)):
        _ = 1 / 0

    assert [file.name for file in tmp_path.iterdir()] == ["actor-rank0-step1-update_actor.json.gz"]


def test_the_phase_is_known_within_it_only() -> None:
    with within_phase(_phase(4)):
        inner = current_phase()
    assert inner is not None
    assert (inner.phase, inner.step) == ("update_actor", 4)
    assert current_phase() is None


_HANGING = r"""
import subprocess, sys, time
from pathlib import Path
from ppojob_trainer.telemetry import CurrentPhase, configure_logging
from ppojob_trainer.worker_groups import watchdog

own_output, limit_s, longest_s = Path(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
watchdog._PY_SPY_TIMEOUT_S = 180.0
in_child = "import time\ndef in_the_child():\n    print('up', flush=True)\n    time.sleep(600)\nin_the_child()"
child = subprocess.Popen([sys.executable, "-c", in_child], stdout=subprocess.PIPE)
assert child.stdout.readline() == b"up\n"

def where_it_hangs():
    # Until all is reported.
    expected, deadline = ("in where_it_hangs", f"child process {child.pid}:"), time.monotonic() + longest_s
    while time.monotonic() < deadline and not all(text in own_output.read_text() for text in expected):
        time.sleep(0.1)

configure_logging()
with watchdog.watched("rollout rank 0", "generate", CurrentPhase("gen", "rollout", 7, time.time() + limit_s)):
    where_it_hangs()
child.kill()
child.wait()
"""


def _output_of_a_call(folder: Path, *, limit_s: float, longest_s: float) -> str:
    """Return what a call with this limit says that hangs until it is reported, for at most so long."""
    output = folder / "output"
    command = [sys.executable, "-c", _HANGING, str(output), str(limit_s), str(longest_s)]
    with output.open("w") as file:
        subprocess.run(command, stderr=file, timeout=500, check=True)
    return output.read_text()


def test_a_call_that_hangs_reports_where_and_where_its_children_are(tmp_path: Path) -> None:
    told = _output_of_a_call(tmp_path, limit_s=0.5, longest_s=400.0)

    assert "rollout rank 0 still runs generate: phase gen of step 7 reaches its limit in 0.0 s" in told
    assert "in where_it_hangs" in told
    # Where a sandbox forbids to look into another process, py-spy says so.
    assert "child process" in told
    assert "in_the_child" in told or "ermission" in told


def test_a_call_that_ends_in_time_reports_nothing(tmp_path: Path) -> None:
    assert _output_of_a_call(tmp_path, limit_s=3600.0, longest_s=0.0) == ""


class _Decoder:
    def batch_decode(self, sequences: Any, skip_special_tokens: bool = False) -> list[str]:
        return ["text"] * len(sequences)


@pytest.mark.parametrize(
    ("role", "rank", "step", "number", "lines"),
    [
        ("data", 0, 4, 2, 2),
        ("data", 1, 4, 2, 0),
        ("data", 0, None, 2, 0),
        ("data", 0, 4, 0, 0),
    ],
)
def test_the_first_process_keeps_samples_of_its_step(
    tmp_path: Path, role: str, rank: int, step: int | None, number: int, lines: int
) -> None:
    spec = parse_spec({**RAW, "telemetry": {"samplesPerStep": number}})
    keeper = SampleKeeper(WorkerContext(role, rank, 2, 1, tmp_path / "log", 1.0, run_folder=tmp_path), spec)
    rows = rollout_batch([[1]] * 4, [[1] * 3] * 4)
    texts = {name: ["x"] * 4 for name in (Keys.SOURCE, Keys.DATA_SOURCE, Keys.GROUND_TRUTH)}
    numbers = {Keys.INDEX: [1] * 4, Keys.SAMPLE_INDEX: [0] * 4}
    rows[Keys.TOKEN_LEVEL_SCORES] = Ragged.from_rows([[1.0] * 3] * 4, torch.float32)
    batch = DataProto.from_dict(rows, {**texts, **numbers})

    with within_phase(None if step is None else _phase(step)):
        keeper.keep(batch, _Decoder())

    file = tmp_path / "samples.jsonl"
    found = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    assert [(line["step"], line["score"]) for line in found] == [(4, 3.0)] * lines
