"""The command line of the benchmark."""

import subprocess
import sys

import pytest
import torch

from tests.bench.bench_split import _arguments


@pytest.mark.parametrize(
    ("options", "found", "gpus"),
    [
        ([], 3, 3),
        (["--gpus", "2"], 3, 2),
        (["--device", "CPU"], 0, 2),
        (["--device", "CPU", "--gpus", "4"], 0, 4),
    ],
)
def test_without_a_number_all_gpus_are_taken(
    monkeypatch: pytest.MonkeyPatch, options: list[str], found: int, gpus: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(sys, "argv", ["bench_split", "--output", "out", *options])

    assert _arguments().gpus == gpus


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["bench_split", "--output", "out"])

    with pytest.raises(SystemExit):
        _arguments()

    assert "--device CUDA: no GPU is found here; take --device CPU" in capsys.readouterr().err


def test_a_layout_that_is_not_there_is_refused_before_anything_is_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--device", "CPU", "--layouts", "colocated,halves"]
    monkeypatch.setattr(sys, "argv", ["bench_split", "--output", "out", *options])

    with pytest.raises(SystemExit):
        _arguments()

    assert "--layouts colocated,halves: there is no layout halves on 2 GPUs: take some of" in capsys.readouterr().err


def test_a_benchmark_that_is_ended_ends_what_it_runs() -> None:
    program = """
import time
from tests.bench import bench_split

def measure():
    try:
        print("measures", flush=True)
        time.sleep(600)
    finally:
        print("has ended it", flush=True)

bench_split._arguments = measure
bench_split.main()
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "measures\n"
        process.terminate()
        assert process.stdout.read() == "has ended it\n"

    assert process.returncode == 143
