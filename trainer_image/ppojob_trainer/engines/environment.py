"""Environment variables with which an engine's process must be started, because libraries read them at import.

Called by the worker groups, which set them for the process that holds an engine. It imports neither torch nor vLLM, so
the controller can call it.
"""

from __future__ import annotations

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec


def base_environment(device: Device, num_threads: int | None = None) -> dict[str, str]:
    """Return the variables that every engine needs.

    Args:
        num_threads: threads of this process on device CPU. None: not set; Ray then sets 1 for actors with less than one
            CPU.
    """
    common = {
        # The model is a folder; without this, transformers would ask the hub for files that are missing in it.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Roles share the cores. By default OpenMP's threads spin at each barrier, while the thread that they wait for is
    # kept off its core by another spinning process: on device CPU generation was five times slower.
    common |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    if device is Device.CUDA:
        return common | {"NCCL_NVLS_ENABLE": "0"}
    return common if num_threads is None else common | {"OMP_NUM_THREADS": str(num_threads)}


def pool_environment(spec: PPOJobSpec, pool: str) -> dict[str, str]:
    """Return the variables of a pool's processes; the pool's network variables override the defaults."""
    return base_environment(spec.device) | spec.pool(pool).network.environment()
