"""A failed GPU is recognized by the words of CUDA, NCCL and the driver, and named with the pod's address."""

import pickle

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind, FailureRecord
from ppojob_trainer.main.failures import failure_record
from ppojob_trainer.worker_groups.errors import GPUFaultError, WorkerFailedError
from ppojob_trainer.worker_groups.gpu_faults import is_gpu_fault


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: uncorrectable ECC error encountered",
        "CUDA error: uncorrectable NVLink error detected during the execution",
        "CUDA error: hardware stack error",
        "NCCL error: unhandled cuda error. Last error: Cuda failure 214 'uncorrectable ECC error encountered'",
        "NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.",
        "NVML: GPU is lost",
    ],
)
def test_what_says_that_a_gpu_has_failed(words: str) -> None:
    assert is_gpu_fault(RuntimeError(words))


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: an illegal memory access was encountered",
        "CUDA out of memory. Tried to allocate 20.00 MiB",
        "NCCL error: remote process exited or there was a network error",
        "the ECC curve is not supported",
        "uncorrectable typo in the prompt",
    ],
)
def test_what_a_program_may_cause_is_no_fault_of_the_gpu(words: str) -> None:
    assert not is_gpu_fault(RuntimeError(words))


def test_the_error_that_it_follows_from_counts() -> None:
    error = ValueError("the update failed")
    error.__cause__ = RuntimeError("CUDA error: uncorrectable ECC error encountered")

    assert is_gpu_fault(error)


def test_the_failure_has_role_rank_and_address() -> None:
    error = WorkerFailedError("actor rank 3 failed in update: GPUFaultError: a GPU has failed")
    error.__cause__ = pickle.loads(pickle.dumps(GPUFaultError("a GPU has failed", "10.0.0.3")))

    record = failure_record(error)

    assert (record.reason, record.kind) == (Reason.GPU_FAULT, FailureKind.INFRASTRUCTURE)
    assert (record.message, record.address) == ("actor rank 3: a GPU has failed", "10.0.0.3")
    assert FailureRecord.from_log(record.to_log_line()) == record


def test_a_record_of_a_newer_trainer_is_read() -> None:
    line = FailureRecord(reason="X", message="m", kind=FailureKind.USER).to_log_line()

    assert FailureRecord.from_log(line.replace('"message"', '"novelty": 1, "message"')) is not None
