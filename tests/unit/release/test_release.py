"""What `make release` writes, and that the wheel works where nothing else is installed."""

import hashlib
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
import yaml
from packaging.version import Version

from tests.unit.release.test_version import VERSION
from tools.release.__main__ import _tool, release
from tools.release.version import IMAGES, PROJECT, ReleaseError

IN_PYTHON = str(Version(VERSION))
"""Python's spelling, in the names of wheel and sdist: 0.3.0.dev0 for 0.3.0-dev."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# All modules that a user's own machine loads by `kubectl ppo`, and by `ppojob validate`, `convert` and `plot`.
_IMPORT_ALL = """
import importlib, pkgutil
import ppojob_trainer.cli, ppojob_trainer.commands.convert, ppojob_trainer.kubectl, ppojob_trainer.telemetry.plot
import ppojob_trainer.telemetry.timing_plot
for package in (ppojob_trainer.kubectl, ppojob_trainer.commands.convert):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
        print(module.name)
"""


class Machine:
    """An environment with our wheel and nothing else but what an extra brings."""

    def __init__(self, folder: Path, wheel: Path, extra: str) -> None:
        self.folder = folder
        self._uv("venv", f"--python={sys.executable}", str(folder))
        requirement = f"ppojob[{extra}] @ {wheel.as_uri()}" if extra else f"ppojob @ {wheel.as_uri()}"
        self.install(requirement, f"--constraint={PROJECT / 'requirements' / 'dev.txt'}")

    def install(self, *arguments: str) -> None:
        self._uv("pip", "install", f"--python={self.folder / 'bin' / 'python'}", *arguments)

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        environment = {"PATH": os.environ["PATH"], "HOME": str(self.folder)}
        command = [str(self.folder / "bin" / program), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=600, check=False
        )

    def _uv(self, *arguments: str) -> None:
        command = [str(_tool("uv")), *arguments]
        # In another folder, because pyproject.toml keeps packages away.
        done = subprocess.run(command, cwd=self.folder.parent, capture_output=True, text=True, timeout=600, check=False)
        assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a release, as `make release` does."""
    folder = tmp_path_factory.mktemp("release") / "dist"
    try:
        release(folder, registry="registry.example/rl")
    except ReleaseError as error:
        if str(error).startswith("helm is missing"):
            pytest.skip(str(error))
        raise
    return folder


@pytest.fixture(scope="module")
def wheel(released: Path) -> Path:
    (found,) = released.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def users_machine(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Machine:
    """Return a user's own machine, with `kubectl ppo`."""
    return Machine(tmp_path_factory.mktemp("user") / "environment", wheel, "kubectl")


def test_a_release_has_its_files_and_their_sums(released: Path) -> None:
    names = {path.name for path in released.iterdir() if not path.name.startswith(".")}
    sums = dict(line.split("  ")[::-1] for line in (released / "SHA256SUMS").read_text().splitlines())

    assert names == {
        f"ppojob-{IN_PYTHON}.tar.gz", f"ppojob-{IN_PYTHON}-py3-none-any.whl", f"ppojob-{VERSION}.tgz", "images.txt",
        "SHA256SUMS",
    }  # fmt: skip
    assert sums == {name: hashlib.sha256((released / name).read_bytes()).hexdigest() for name in names - {"SHA256SUMS"}}
    assert (released / "images.txt").read_text().split() == [f"registry.example/rl/{name}:{VERSION}" for name in IMAGES]


def test_the_same_commit_gives_the_same_bytes(released: Path, tmp_path: Path) -> None:
    release(tmp_path / "again", registry="registry.example/rl")

    assert (tmp_path / "again" / "SHA256SUMS").read_text() == (released / "SHA256SUMS").read_text()


def test_the_sdist_has_the_packages_and_nothing_else(released: Path) -> None:
    with tarfile.open(released / f"ppojob-{IN_PYTHON}.tar.gz") as archive:
        names = [name.partition("/")[2] for name in archive.getnames()]
    tops = {"/".join(name.split("/")[:2]) for name in names}

    assert tops == {
        "operator/ppojob_api", "operator/ppojob_operator", "trainer_image/ppojob_trainer", "CHANGELOG.md", "LICENSE",
        "PKG-INFO", "README.md", "SECURITY.md", ".gitignore", "pyproject.toml",
    }  # fmt: skip
    assert [name for name in names if "__pycache__" in name or name.endswith(".pyc")] == []


def test_the_wheel_has_all_modules_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = message_from_bytes(archive.read(f"ppojob-{IN_PYTHON}.dist-info/METADATA"))
    ours = [path.relative_to(root).as_posix() for root in (PROJECT / "operator", PROJECT / "trainer_image")
            for path in root.glob("ppojob_*/**/*.py")]  # fmt: skip

    assert {name for name in names if name.endswith(".py")} == set(ours)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE"]
    assert f"ppojob-{IN_PYTHON}.dist-info/licenses/LICENSE" in names
    assert "Apache License" in (PROJECT / "LICENSE").read_text()


def test_the_chart_says_what_changed_and_which_images_it_runs(released: Path) -> None:
    with tarfile.open(released / f"ppojob-{VERSION}.tgz") as archive:
        definition = archive.extractfile("ppojob/Chart.yaml")
        assert definition is not None
        chart = yaml.safe_load(definition)
        names = archive.getnames()
    notes = {key.removeprefix("artifacthub.io/"): value for key, value in chart["annotations"].items()}

    assert (chart["version"], chart["appVersion"], notes["license"]) == (VERSION, VERSION, "Apache-2.0")
    assert {"category", "links", "crds"} <= notes.keys()
    assert {change["kind"] for change in yaml.safe_load(notes["changes"])} <= {"added", "changed", "fixed", "removed"}
    assert [image["image"] for image in yaml.safe_load(notes["images"])] == (
        (released / "images.txt").read_text().split()
    )
    assert "ppojob/files/crds/ppojobs.ppojob.dev.yaml" in names


def test_the_programs_of_a_users_machine_run_without_torch(users_machine: Machine) -> None:
    shutil.copy(PROJECT / "examples" / "01-quickstart" / "ppojob.yaml", users_machine.folder / "ppojob.yaml")

    imported = users_machine.run("python", "-c", _IMPORT_ALL)
    assert imported.returncode == 0, imported.stderr
    assert "ppojob_trainer.kubectl.run_folder" in imported.stdout
    for program, *arguments in (
        ("kubectl-ppo", "--help"),
        ("ppojob", "--help"),
        ("ppojob", "validate", "ppojob.yaml"),
        ("ppojob", "convert", "--", "data.train_batch_size=64"),
    ):
        done = users_machine.run(program, *arguments)
        assert "Traceback" not in done.stderr, done.stderr
        assert done.stdout, (program, arguments, done.stderr)
    assert users_machine.run("ppojob", "version").stdout == f"{VERSION}\n"


def test_a_command_that_needs_more_names_the_extra(users_machine: Machine) -> None:
    done = users_machine.run("ppojob", "run", "ppojob.yaml", "--dry-run")

    assert done.returncode == 1
    assert done.stderr.startswith("error: the Python package obstore is missing: install ppojob with the extra trainer")


def test_a_wheel_without_extras_names_them(tmp_path: Path, wheel: Path) -> None:
    bare = Machine(tmp_path / "bare", wheel, "")

    for program, extra in (("ppojob", "trainer"), ("kubectl-ppo", "kubectl"), ("ppojob-operator", "operator")):
        done = bare.run(program, "--help")
        assert done.returncode == 1
        assert done.stderr.startswith("error: the Python package ")
        assert f"install ppojob with the extra {extra}" in done.stderr


def test_the_operator_starts_with_its_extra(tmp_path: Path, wheel: Path) -> None:
    machine = Machine(tmp_path / "operator", wheel, "operator")

    done = machine.run("ppojob-operator")

    assert done.returncode == 1
    assert "ppojob-operator: no cluster: run in a pod with a service account, or set KUBECONFIG" in done.stderr
    assert "Traceback" not in done.stderr
