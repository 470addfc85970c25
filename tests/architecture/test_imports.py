"""Who may import whom: the contracts of `.importlinter`, and what fresh processes really load."""

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONTRACT = sorted(Path("operator/ppojob_api").rglob("*.py"))
CONTRACT_MAY_IMPORT = {"ppojob_api", "pydantic", "pydantic_core", *sys.stdlib_module_names}
GENERATOR_MAY_IMPORT = {"yaml"}
SOURCES = ("operator", "trainer_image")
# One statement for each contract, which it forbids; the stray file has no room.
BREAKS = {
    "trainer_image/ppojob_trainer/stray.py": "",
    "operator/ppojob_operator/stray.py": "",
    "operator/ppojob_api/v1alpha1/base.py": "import ppojob_trainer.protocol",
    "operator/ppojob_operator/settings.py": "import ppojob_trainer.protocol",
    "operator/ppojob_operator/plan.py": "import kubernetes, kopf",
    "trainer_image/ppojob_trainer/controller/schedule.py": "import ray",
    "trainer_image/ppojob_trainer/worker_groups/roles/trained.py": "import ppojob_trainer.engines.train.fsdp.engine",
    "trainer_image/ppojob_trainer/engines/train/fsdp/__init__.py": "import vllm\nimport ppojob_trainer.engines.rollout",
    "trainer_image/ppojob_trainer/telemetry/eta.py": "import torch",
    "trainer_image/ppojob_trainer/checkpoints/durable.py": (
        "import typing\nif typing.TYPE_CHECKING:\n    import ppojob_trainer.checkpoints.store"
    ),
}
HEAVY = ("torch", "ray", "vllm", "transformers")


def imported_packages(path: Path) -> set[str]:
    """Return the top packages that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: write imports in full"
            found.add((node.module or "").partition(".")[0])
    return found


def loaded_by(statement: str) -> set[str]:
    """Return the top packages that a fresh process has loaded after a statement."""
    program = f"{statement}\nimport sys\nsys.stdout.write(' '.join(sys.modules))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stderr
    return {name.partition(".")[0] for name in done.stdout.split()}


def lint_imports(root: Path) -> subprocess.CompletedProcess[str]:
    """Check the contracts of `.importlinter` on the packages below a folder."""
    command = [
        str(Path(sys.executable).with_name("lint-imports")),
        "--no-cache",
        "--config",
        str(root / ".importlinter"),
    ]
    path = os.pathsep.join(str((root / folder).absolute()) for folder in (*SOURCES, ""))
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, timeout=500, check=False)


def test_the_import_contracts_are_kept() -> None:
    done = lint_imports(Path())

    assert done.returncode == 0, done.stdout + done.stderr


def test_every_import_contract_can_be_broken(tmp_path: Path) -> None:
    for folder in (*SOURCES, "tools"):
        shutil.copytree(folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(".importlinter", tmp_path)
    for file, statement in BREAKS.items():
        with (tmp_path / file).open("a") as source:
            source.write(f"\n{statement}\n")

    done = lint_imports(tmp_path)

    names = re.findall(r"^name = (.*)$", (tmp_path / ".importlinter").read_text(), re.MULTILINE)
    assert len(names) > 10
    assert [name for name in names if f"{name} BROKEN" not in done.stdout] == [], done.stdout
    assert "Undeclared" in done.stdout or "stray" in done.stdout


@pytest.mark.parametrize("path", CONTRACT, ids=str)
def test_the_contract_depends_on_pydantic_alone(path: Path) -> None:
    allowed = CONTRACT_MAY_IMPORT | (GENERATOR_MAY_IMPORT if path.name == "generate.py" else set())

    assert imported_packages(path) <= allowed


def test_there_is_a_contract() -> None:
    assert CONTRACT


@pytest.mark.parametrize(
    ("statement", "absent"),
    [
        ("import ppojob_operator.main", HEAVY),
        ("import ppojob_api.v1alpha1.validation, ppojob_api.v1alpha1.resolve", (*HEAVY, "yaml", "kubernetes", "kopf")),
        ("import ppojob_trainer.controller.loop", ("ray", "vllm")),
        ("import ppojob_trainer.telemetry, ppojob_trainer.checkpoints", (*HEAVY, "matplotlib", "tensorboard")),
        ("import ppojob_trainer.kubectl.app", (*HEAVY, "httpx", "matplotlib", "pydantic", "kubernetes")),
        ("import ppojob_trainer.cli", (*HEAVY, "httpx", "matplotlib", "tensorboard")),
    ],
)
def test_a_fresh_process_loads_no_more_than_it_needs(statement: str, absent: tuple[str, ...]) -> None:
    assert loaded_by(statement) & set(absent) == set()


def test_a_heavy_package_would_be_seen() -> None:
    assert "rich" in loaded_by("import ppojob_trainer.cli")
