"""Samples memory and utilization of a process's GPU in a thread, through NVML; it does not use CUDA.

Started by `observation` in each process that has a GPU. Without NVML's Python package there is no sampler. If the
driver does not report utilization (MIG), only memory is sampled.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

__all__ = ["GpuSampler", "GpuUse"]

logger = logging.getLogger(__name__)

INTERVAL_S = 0.25


@dataclass(frozen=True)
class GpuUse:
    """Samples of one GPU: peak bytes in use by all processes, total bytes (0: unknown), and sum and number of the
    utilization samples, each from 0 to 1."""

    memory_peak_bytes: int = 0
    memory_total_bytes: int = 0
    utilization_sum: float = 0.0
    num_utilizations: int = 0

    def with_sample(self, memory_bytes: int, total_bytes: int, utilization: float | None) -> GpuUse:
        """Return the use with one more sample."""
        return GpuUse(
            max(self.memory_peak_bytes, memory_bytes),
            total_bytes,
            self.utilization_sum + (utilization or 0.0),
            self.num_utilizations + (utilization is not None),
        )


class GpuSampler:
    """Samples one GPU until the process ends."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self._nvml = nvml
        self._handle = handle
        self._lock = threading.Lock()
        self._use = GpuUse()
        self._tells_utilization = True
        self._sample()
        threading.Thread(target=self._run, name="gpu-sampler", daemon=True).start()

    @classmethod
    def open(cls, gpu_ids: Sequence[int | str]) -> Self | None:
        """Return a sampler of the first GPU (by index or UUID); None if there is no GPU or NVML does not know it."""
        if not gpu_ids:
            return None
        try:
            nvml = importlib.import_module("pynvml")
        except ImportError:
            logger.warning("without the package nvidia-ml-py there is no utilization of the GPUs in the metrics")
            return None
        name = str(gpu_ids[0])
        try:
            nvml.nvmlInit()
            by_name = nvml.nvmlDeviceGetHandleByIndex if name.isdigit() else nvml.nvmlDeviceGetHandleByUUID
            return cls(nvml, by_name(int(name) if name.isdigit() else name))
        except nvml.NVMLError as error:
            logger.warning("NVML does not know GPU %s, so its use is not in the metrics: %s", name, error)
            return None

    def take(self) -> GpuUse:
        """Return the samples since the last call, and one that is taken now."""
        self._sample()
        with self._lock:
            use, self._use = self._use, GpuUse()
        return use

    def _run(self) -> None:
        pause = threading.Event()
        while not pause.wait(INTERVAL_S):
            self._sample()

    def _sample(self) -> None:
        try:
            memory = self._nvml.nvmlDeviceGetMemoryInfo(self._handle)
        except self._nvml.NVMLError:
            # If the GPU failed, the training reports it.
            return
        utilization = self._utilization()
        with self._lock:
            self._use = self._use.with_sample(int(memory.used), int(memory.total), utilization)

    def _utilization(self) -> float | None:
        if not self._tells_utilization:
            return None
        try:
            return float(self._nvml.nvmlDeviceGetUtilizationRates(self._handle).gpu) / 100
        except self._nvml.NVMLError:
            self._tells_utilization = False
            return None
