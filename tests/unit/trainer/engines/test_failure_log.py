"""vLLM's own words on why it failed are found in its log."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppojob_trainer.engines.errors import RolloutError, RolloutHostMemoryError, WeightReceiptError
from ppojob_trainer.engines.rollout.failure_log import explain, explained, memory_shortage

STARTED = "vLLM could not start with the model /m: "
POINTER = "Engine core initialization failed. See root cause above. Failed core proc(s): {}"


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            "(EngineCore pid=12) ERROR 11-22 10:53:46 [core.py:1146] ValueError: Free memory on device (60/139.8 GiB) "
            "on startup is less than desired GPU memory utilization (0.9, 125.8 GiB).\n(EngineCore pid=12) the end\n",
            "Free memory on device (60/139.8 GiB) on startup is less than desired GPU memory utilization "
            "(0.9, 125.8 GiB).",
        ),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "CUDA out of memory. Tried to "),
        ("vLLM's workers failed in ppojob_receive_weights: CUDA out of memory. Tried", "vLLM's workers failed in"),
        ("CUDA Error: out of memory at cumem_allocator.cpp:139", "CUDA Error: out of memory"),
    ],
)
def test_a_shortage_of_memory_is_found_in_the_log_of_vllms_processes(log: str, words: str) -> None:
    found = memory_shortage(f"started\n{log}")
    assert found is not None
    assert found.startswith(words)


def test_a_node_without_memory_for_the_cache_of_an_engine_on_cpus_is_named(tmp_path: Path) -> None:
    """As vLLM 0.32 says it; its arguments are not the user's."""
    said = (
        "Available memory on node 0 (0.42/3.0 GiB) on kv cache allocation is less than requested memory for kv "
        "(1.0 GiB)"
    )
    seen = RolloutError(
        f"vLLM could not start with the model /m: RuntimeError: Worker failed with error '{said}. Decrease "
        "--kv-cache-memory-bytes, VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes.', please check "
        "the stack trace above for the root cause"
    )

    found = explained(seen, tmp_path / "log")

    assert (type(found), str(found)) == (RolloutHostMemoryError, said)


def test_another_failure_is_no_shortage_of_memory() -> None:
    assert (
        memory_shortage("(EngineCore pid=12) INFO memory profiling took 2 s\nRuntimeError: Engine core failed") is None
    )


# As vLLM 0.32 logs it on CUDA where torchvision is missing: by its logger, and again as the process ends.
MISSING_MODULE = """\
(EngineCore pid=77) INFO 11-23 05:00:01 [gpu_worker.py:500] Available KV cache memory: 60.1 GiB
(EngineCore pid=77) ERROR 11-23 05:00:02 [core.py:1146] EngineCore failed to start.
(EngineCore pid=77) ERROR 11-23 05:00:02 [core.py:1146] Traceback (most recent call last):
(EngineCore pid=77) ERROR 11-23 05:00:02 [core.py:1146]   File "core.py", line 1120, in run_engine_core
(EngineCore pid=77) ERROR 11-23 05:00:02 [core.py:1146]     engine_core = EngineCoreProc(*args, **kwargs)
(EngineCore pid=77) ERROR 11-23 05:00:02 [core.py:1146] ModuleNotFoundError: No module named 'torchvision'
(EngineCore pid=77) Process EngineCore:
(EngineCore pid=77) Traceback (most recent call last):
(EngineCore pid=77)   File "process.py", line 314, in _bootstrap
(EngineCore pid=77)     self.run()
(EngineCore pid=77) ModuleNotFoundError: No module named 'torchvision'
"""
OF_A_WORKER = """\
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900] Traceback (most recent call last):
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900]   File "worker.py", line 1, in init_device
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900] torch.AcceleratorError: CUDA error: invalid device
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900]
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900] The above exception was the direct cause of the \
following exception:
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900]
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900] Traceback (most recent call last):
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900]   File "worker.py", line 9, in start
(Worker pid=5) ERROR 11-23 05:00:02 [multiproc_executor.py:900] RuntimeError: the worker could not start
(EngineCore pid=4) ERROR 11-23 05:00:03 [core.py:1146] Traceback (most recent call last):
(EngineCore pid=4) ERROR 11-23 05:00:03 [core.py:1146]   File "core.py", line 1120, in run_engine_core
(EngineCore pid=4) ERROR 11-23 05:00:03 [core.py:1146] Exception: WorkerProc initialization failed due to an \
exception in a background process. See stack trace for root cause.
"""


@pytest.mark.parametrize(
    ("log", "cause"),
    [
        (MISSING_MODULE, "ModuleNotFoundError: No module named 'torchvision'"),
        (OF_A_WORKER, "AcceleratorError: CUDA error: invalid device"),
        # A failure that vLLM survived, before the one that ended it.
        (f"Traceback (most recent call last):\n  File x\nOSError: no cache\n{MISSING_MODULE}", "ModuleNotFoundError: "),
    ],
    ids=["a module is missing", "a worker failed", "the last failure counts"],
)
def test_the_root_cause_takes_the_place_of_the_pointer_to_the_log(log: str, cause: str) -> None:
    found = explain(STARTED + POINTER, log)

    assert found.startswith(STARTED + cause)
    assert "Failed core proc" not in found


def test_a_message_that_names_its_cause_is_kept() -> None:
    assert explain(f"{STARTED}no such model", MISSING_MODULE) == f"{STARTED}no such model"


def test_without_a_traceback_the_pointer_is_kept() -> None:
    assert explain(STARTED + POINTER, "INFO 11-23 05:00:01 [core.py:1] ready") == STARTED + POINTER


def test_an_explained_failure_keeps_the_node_of_its_worker(tmp_path: Path) -> None:
    error = WeightReceiptError("vLLM's worker 3 failed in ppojob_receive_weights: CUDA error")
    error.address = "10.0.0.7"

    found = explained(error, tmp_path / "no-log")

    assert isinstance(found, WeightReceiptError)
    assert (str(found), found.address) == (str(error), "10.0.0.7")
