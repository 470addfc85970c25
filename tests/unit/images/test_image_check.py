"""The check inside an image finds each module and names the missing ones."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tools.images.inside import LIBRARIES, failure_of, import_all, imports_of, modules_of
from tools.images.recipes import PROJECT

SOURCE = """
import above
from vllm.models import one, two
from . import beside
if TYPE_CHECKING:
    import for_types
try:
    import perhaps
except ImportError:
    pass
def warm_up():
    from vllm.models.minimax import late
    with something():
        import deep
"""


def test_imports_in_functions_are_found_and_those_that_may_fail_are_not() -> None:
    assert list(imports_of(ast.parse(SOURCE))) == [
        ("above", ""),
        ("vllm.models", "one"),
        ("vllm.models", "two"),
        ("vllm.models.minimax", "late"),
        ("deep", ""),
    ]


def test_every_module_of_a_package_is_found() -> None:
    found = set(modules_of("ppojob_operator"))

    files = {path for path in (PROJECT / "operator" / "ppojob_operator").rglob("*.py")}
    assert len(found) == len(files)
    assert {"ppojob_operator", "ppojob_operator.manifests.pod", "ppojob_operator.admission"} <= found


def test_the_operator_s_modules_can_be_imported() -> None:
    count, failures = import_all("operator")

    assert failures == []
    assert count > 100


@pytest.mark.parametrize(
    ("module", "name", "words"),
    [
        ("ppojob_api.v1alpha1.spec", "", ""),
        ("ppojob_api.v1alpha1.spec", "PPOJobSpec", ""),
        ("ppojob_api.v1alpha1", "spec", ""),
        ("no_such_module", "", "import of no_such_module: ModuleNotFoundError"),
        ("ppojob_api", "no_such_name", "import of ppojob_api (no_such_name): ModuleNotFoundError"),
    ],
)
def test_a_failed_import_has_its_name_and_cause(module: str, name: str, words: str) -> None:
    failure = failure_of(module, name)

    assert failure.startswith(words)
    assert bool(failure) == bool(words)


@pytest.mark.parametrize("kind", ["operator", "trainer"])
def test_every_library_that_the_check_imports_is_required(kind: str) -> None:
    packages = {name.partition(".")[0] for name in LIBRARIES[kind]}

    assert [package for package in packages if importlib.util.find_spec(package) is None] == []


def test_an_environment_that_lacks_a_module_fails_with_all_their_names() -> None:
    bare = {"PATH": os.environ["PATH"], "HOME": tempfile.gettempdir()}
    script = Path("tools/images/inside.py").read_text()

    done = subprocess.run(
        [sys.executable, "-S", "-", "operator"], input=script, env=bare, capture_output=True, text=True, check=False
    )

    assert done.returncode == 1
    for module in ("kopf", "kubernetes", "cryptography"):
        assert f"MISSING: import of {module}: ModuleNotFoundError" in done.stdout
