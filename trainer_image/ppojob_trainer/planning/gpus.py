"""What a plan knows of a kind of GPU: memory and speeds, from the vendor's data sheets. Called by `plan`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ppojob_trainer.engines.train.fsdp.flops import PEAK_FLOPS

__all__ = ["DEFAULT_GPU", "GPUS", "Gpu", "gpus_of_pools"]

_GIB: Final = 2**30


@dataclass(frozen=True)
class Gpu:
    """One kind of GPU.

    memory: bytes that CUDA reports, rounded down to a tenth of a GiB. bandwidth: of its memory, in bytes per second.
    network: of the adapter that the vendor's servers have for each GPU, in bytes per second and direction: 400 Gb/s in
    DGX H100, H200 and B200, 200 Gb/s in DGX A100. No DGX has the L40S; 100 Gb/s is an assumption. host: of the link to
    the host's memory (PCIe with 16 lanes), in bytes per second and direction. has_fp8: it multiplies 8-bit
    floating-point numbers.
    """

    name: str
    memory: float
    bandwidth: float
    network: float
    host: float
    has_fp8: bool = True

    @property
    def peak_flops(self) -> float:
        """Dense bfloat16 operations per second."""
        return PEAK_FLOPS[self.name]


GPUS: Final[dict[str, Gpu]] = {
    gpu.name: gpu
    for gpu in (
        Gpu("B200", 178.3 * _GIB, 8.0e12, 50e9, 64e9),
        Gpu("H200", 139.8 * _GIB, 4.8e12, 50e9, 64e9),
        Gpu("H100", 79.1 * _GIB, 3.35e12, 50e9, 64e9),
        Gpu("A100", 79.1 * _GIB, 2.0e12, 25e9, 32e9, has_fp8=False),
        Gpu("L40S", 44.4 * _GIB, 0.86e12, 12.5e9, 32e9),
    )
}
DEFAULT_GPU: Final = "H200"


def gpus_of_pools(pools: Sequence[str], choices: Sequence[str]) -> Mapping[str, Gpu]:
    """Return the GPU of each pool.

    Args:
        choices: names of GPUs, for all pools or as `pool=name`; the last one counts.

    Raises:
        ValueError: a pool or a GPU is not known.
    """
    found = dict.fromkeys(pools, DEFAULT_GPU)
    for choice in choices:
        pool, is_of_pool, name = choice.rpartition("=")
        if name not in GPUS:
            raise ValueError(f"--gpu {choice}: {name} is not known: use one of {', '.join(GPUS)}")
        if is_of_pool and pool not in found:
            raise ValueError(f"--gpu {choice}: the job has no pool {pool}: use one of {', '.join(pools)}")
        found |= dict.fromkeys([pool] if is_of_pool else pools, name)
    return {pool: GPUS[name] for pool, name in found.items()}
