"""What the other parts know of the machine without a network: where the pack is, which Python it has, what pods see.

Pods run from an image without content: the machine's folders are mounted into it at the same paths, so that many
gigabytes of torch and CUDA need not be copied. Everything here is read from the arguments and this process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tools.cluster.layout import Layout

USER_ID = 1000
OPERATOR_USER_ID = 65532
HOME = "/home/ppojob"
# In every pod's image: the programs that the pods start by name.
PROGRAMS = "/ppojob/bin"
_SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


@dataclass(frozen=True)
class Machine:
    """One machine without a network.

    `folder`: the unpacked pack. `site`: packages that the trainer has beside those of this interpreter; None if it has
    all. `devices`: where the GPUs' device nodes lie.
    """

    folder: Path
    site: Path | None
    devices: Path = Path("/dev")

    @property
    def layout(self) -> Layout:
        """The cluster's folders, all below the pack but for the sockets."""
        return Layout(cache=self.folder / "cache", state=self.folder / "state")

    @property
    def output(self) -> Path:
        """Results, and what was asked about them."""
        return self.folder / "output"

    @property
    def system(self) -> Path:
        """The container runtime and its like, which other machines have from their distribution."""
        return self.folder / "system"

    @property
    def packages(self) -> Path:
        """The operator's Python packages; empty where the interpreter was said to have them."""
        return self.folder / "packages"

    @property
    def sources(self) -> list[Path]:
        """What of the project goes on PYTHONPATH."""
        source = self.folder / "source"
        return [source, source / "operator", source / "trainer_image"]

    def trainer_environment(self) -> dict[str, str]:
        """The variables with which a trainer runs, in a pod and outside."""
        python_path = [*self.sources, *([self.site] if self.site else [])]
        return {
            **self._environment(python_path),
            "HF_HUB_OFFLINE": "1",
            # FlashInfer's kernels are compiled with files that would have to be fetched.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
            # A virtual machine's GPUs cannot do NVLink's multicast, and NCCL would try.
            "NCCL_NVLS_ENABLE": "0",
            **{name: os.environ[name] for name in ("LD_LIBRARY_PATH", "CUDA_HOME") if name in os.environ},
        }

    def operator_environment(self) -> dict[str, str]:
        """The variables of the operator's pod."""
        return self._environment([*self.sources, self.packages])

    def _environment(self, python_path: list[Path]) -> dict[str, str]:
        return {
            "PATH": f"{PROGRAMS}:{Path(sys.executable).parent}:{_SYSTEM_PATH}",
            "PYTHONPATH": ":".join(map(str, python_path)),
            "PYTHONUNBUFFERED": "1",
            "LANG": "C.UTF-8",
            "USER": "ppojob",
        }

    def mounts(self) -> list[Path]:
        """The folders of the machine that every pod sees, at their own paths; none lies in another."""
        wanted = [
            *(Path(path) for path in ("/usr", "/opt", "/bin", "/sbin", "/lib", "/lib64")),
            # An environment's programs are links to the interpreter that it was made from.
            *(Path(path).resolve() for path in (sys.prefix, sys.base_prefix)),
            Path(sys.prefix),
            *(Path(path) for path in sys.path if path),
            *self.sources,
            self.packages,
            *([self.site] if self.site else []),
        ]
        return outermost(path for path in wanted if path.is_dir() and not (path.is_symlink() and len(path.parts) == 2))


def outermost(paths: Iterable[Path]) -> list[Path]:
    """The paths that lie in no other of them, each once."""
    found: list[Path] = []
    for path in sorted(dict.fromkeys(paths), key=lambda path: len(path.parts)):
        if not any(path.is_relative_to(other) for other in found):
            found.append(path)
    return found
