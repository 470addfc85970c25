"""requirements/trainer.txt has what vLLM imports when it starts on CUDA, and the versions that the tests ran with.

No GPU is needed: vLLM's build for the CPU has the same Python sources. What its CUDA start imports is read from them:
all that its modules import when they are imported, and, of its kernels' warm-up, also what its functions import. That
one imports the code of models that nobody asked for, and with it packages that nothing else needs.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator, Set
from functools import cache
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest

STARTS = ("vllm.v1.engine.async_llm", "vllm.v1.worker.gpu_worker", "vllm.model_executor.warmup.kernel_warmup")
WARM_UP = "vllm.model_executor.warmup"
# The distributions of modules that are not installed beside vLLM's build for the CPU, where the names differ.
DISTRIBUTIONS = {
    "cutlass": "nvidia-cutlass-dsl",
    "cuda": "cuda-bindings",
    "flashinfer": "flashinfer-python",
    "quack": "quack-kernels",
}


def pins(name: str) -> dict[str, str]:
    text = Path("requirements", f"{name}.txt").read_text()
    return dict(re.findall(r"^([\w.-]+)(?:\[[^\]]*\])?==([^\s;\\]+)", text, re.MULTILINE))


def source_of(module: str) -> Path | None:
    spec = find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parents[1].joinpath(*module.split("."))
    found = [file for file in (path / "__init__.py", path.with_suffix(".py")) if file.is_file()]
    return found[0] if found else None


def imports(body: list[ast.stmt], package: str, *, within_functions: bool) -> Iterator[str]:
    """Yield the modules that must be there; an import in an `if` or a `try` may be missing."""
    for node in body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield module
            yield from (f"{module}.{alias.name}" for alias in node.names if source_of(f"{module}.{alias.name}"))
        elif isinstance(node, ast.ClassDef) or (within_functions and isinstance(node, ast.FunctionDef)):
            yield from imports(node.body, package, within_functions=within_functions)


@cache
def imported_on_cuda() -> dict[str, str]:
    """Return each package that vLLM imports, and a module of vLLM's that does."""
    found: dict[str, str] = {}
    seen: set[str] = set()
    todo = list(STARTS)
    while todo:
        module = todo.pop()
        parts = module.split(".")
        todo += [".".join(parts[:end]) for end in range(1, len(parts)) if ".".join(parts[:end]) not in seen]
        source = source_of(module)
        if module in seen or source is None:
            continue
        seen.add(module)
        package = module if source.name == "__init__.py" else module.rpartition(".")[0]
        tree = ast.parse(source.read_text())
        for name in imports(tree.body, package, within_functions=module.startswith(WARM_UP)):
            top = name.partition(".")[0]
            if top == "vllm":
                todo.append(name)
            elif top not in sys.stdlib_module_names:
                found.setdefault(top, module)
    return found


def missing(pinned: Set[str]) -> list[str]:
    installed = packages_distributions()

    def is_pinned(package: str) -> bool:
        names = installed.get(package) or [DISTRIBUTIONS.get(package, package)]
        return any(re.sub(r"[._]", "-", name).lower() in pinned for name in names)

    return [f"{package}, which {by} imports" for package, by in imported_on_cuda().items() if not is_pinned(package)]


def test_what_vllm_imports_on_cuda_is_pinned() -> None:
    assert len(imported_on_cuda()) > 20
    assert missing(pins("trainer").keys()) == []


@pytest.mark.parametrize("package", ["torchvision", "einops", "flashinfer-python"])
def test_a_package_that_is_missing_is_named(package: str) -> None:
    (found,) = missing(pins("trainer").keys() - {package})

    assert found.startswith(package.removesuffix("-python"))


@pytest.mark.parametrize("other", ["trainer-cpu", "dev"])
def test_gpus_and_cpus_have_the_same_versions(other: str) -> None:
    on_gpus, on_cpus = pins("trainer"), pins(other)

    both = on_gpus.keys() & on_cpus.keys()

    assert {"torch", "transformers", "ray", "numpy", "pydantic"} <= both
    assert {name: on_cpus[name] for name in both} == {name: on_gpus[name] for name in both}
