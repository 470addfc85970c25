"""Variables that an engine's process must be started with: libraries read them when they are loaded.

Called by the worker groups, which put them into the environment of the process that holds an engine. It imports
neither torch nor vLLM, so the controller can ask.
"""

from __future__ import annotations

from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec


def base_environment(device: Device, num_threads: int | None = None) -> dict[str, str]:
    """Return what every engine needs.

    Args:
        num_threads: of this process on device cpu. None leaves it, and then Ray sets 1 for actors with less than a CPU.
    """
    common = {
        # The model is a folder; a hub would be asked for what is missing in it.
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    # Roles share the cores. OpenMP's threads spin at each barrier by default, and then mostly wait for a thread that
    # another spinning process keeps off its core: on device cpu generation was five times slower.
    common |= {"OMP_WAIT_POLICY": "passive", "GOMP_SPINCOUNT": "0", "KMP_BLOCKTIME": "0"}
    if device is Device.CUDA:
        return common | {"NCCL_NVLS_ENABLE": "0"}
    return common if num_threads is None else common | {"OMP_NUM_THREADS": str(num_threads)}


def pool_environment(spec: PPOJobSpec, pool: str) -> dict[str, str]:
    """Return what the processes of a pool need: its own network's variables win over ours."""
    return base_environment(spec.device) | spec.pool(pool).network.environment()
