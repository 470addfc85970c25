"""Rules of what pods get: memory, and the place where the storage is mounted.

`rules.py` puts them beside the others. They are in Python alone: CEL would have to parse quantities and paths.
"""

from collections.abc import Iterator
from pathlib import PurePosixPath

from ppojob_api.v1alpha1 import constants
from ppojob_api.v1alpha1.base import Problem
from ppojob_api.v1alpha1.merging import folder
from ppojob_api.v1alpha1.quantities import parse_quantity
from ppojob_api.v1alpha1.spec import PPOJobSpec

_SYSTEM = (
    *("/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/opt/ppojob", "/proc", "/sbin", "/sys", "/usr"),
    constants.TOKEN_MOUNT_PATH,
)
"""Folders of the image, the kernel and the operator: a volume must not be mounted on or below them."""
_SHARED = ("/", "/home", "/opt", "/run", "/tmp", "/var")
"""Folders with contents of several programs: a volume may be mounted below them, not on them."""


def _resources_are_above_zero(spec: PPOJobSpec) -> Iterator[Problem]:
    amounts = {
        f"pools[{index}].resourcesPerGPU.{name}": getattr(pool.resources_per_gpu, name)
        for index, pool in enumerate(spec.pools)
        for name in ("cpu", "memory", "shm")
    }
    amounts |= {f"head.resources.{name}": getattr(spec.head.resources, name) for name in ("cpu", "memory")}
    for path, amount in amounts.items():
        if parse_quantity(amount) <= 0:
            yield path, amount, "it must be above 0: the pods need some of it"


def _shared_memory_is_part_of_the_memory(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        each = pool.resources_per_gpu
        if parse_quantity(each.shm) > parse_quantity(each.memory):
            remedy = f"shared memory counts towards memory, which is {each.memory}: lower shm or raise memory"
            yield f"pools[{index}].resourcesPerGPU.shm", each.shm, remedy


def _storage_hides_nothing(spec: PPOJobSpec) -> Iterator[Problem]:
    given = spec.storage.mount_path
    path = PurePosixPath(folder(given))
    if ".." in PurePosixPath(given).parts or "\0" in given or ":" in given:
        yield "storage.mountPath", given, "must be a path without .., colons and NUL, such as /data"
    elif str(path) in _SHARED or any(path.is_relative_to(folder) for folder in _SYSTEM):
        yield (
            "storage.mountPath",
            given,
            "a volume there would hide files of the container: use another path, such as /data",
        )


POD_CHECKS = (_resources_are_above_zero, _shared_memory_is_part_of_the_memory, _storage_hides_nothing)
