"""What the images are called and labelled, what goes into them, and the commands that build, check and push them."""

from __future__ import annotations

import os
import re
import subprocess
import tomllib
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tools.cluster.images import base
from tools.images.__main__ import main
from tools.images.recipes import PROJECT, RECIPES, labels, mirrors, public_address, tag

OPERATOR = RECIPES["operator"]
CONTAINERFILES = sorted({recipe.containerfile for recipe in RECIPES.values()})
LABEL = "org.opencontainers.image"


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    command = ["git", "-C", str(folder), *identity, *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project in a git repository with one commit."""
    settings = 'version = "1.2.3"\ndescription = "What it is"\nlicense = "Apache-2.0"\n'
    (tmp_path / "pyproject.toml").write_text(f'[project]\nname = "ppojob"\n{settings}')
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "remote", "add", "origin", "https://ada:secret@git.example/team/ppojob.git")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "--quiet", "--message=One")
    return tmp_path


def test_an_image_of_a_commit_says_all_that_it_is(project: Path) -> None:
    assert labels(OPERATOR, project) == {
        f"{LABEL}.title": OPERATOR.title,
        f"{LABEL}.description": "What it is",
        f"{LABEL}.version": "1.2.3",
        f"{LABEL}.licenses": "Apache-2.0",
        f"{LABEL}.source": "https://git.example/team/ppojob",
        f"{LABEL}.revision": git(project, "rev-parse", "HEAD"),
        f"{LABEL}.created": git(project, "show", "--no-patch", "--format=%cI", "HEAD"),
    }


def test_an_image_of_changed_files_does_not_pass_for_the_commit(project: Path) -> None:
    with (project / "pyproject.toml").open("a") as file:
        file.write("# changed\n")

    found = labels(OPERATOR, project)

    assert found[f"{LABEL}.revision"] == f"{git(project, 'rev-parse', 'HEAD')}-changed"
    assert f"{LABEL}.created" not in found


def test_without_a_repository_the_labels_that_git_knows_are_left_out(project: Path) -> None:
    subprocess.run(["rm", "-rf", str(project / ".git")], check=True)

    assert {name.removeprefix(f"{LABEL}.") for name in labels(OPERATOR, project)} == {
        "title",
        "description",
        "version",
        "licenses",
    }


@pytest.mark.parametrize(
    ("remote", "address"),
    [
        ("https://git.example/team/ppojob.git", "https://git.example/team/ppojob"),
        ("https://ada:secret@git.example/team/ppojob", "https://git.example/team/ppojob"),
        ("git@git.example:team/ppojob.git", "https://git.example/team/ppojob"),
        ("ssh://git@git.example:2222/team/ppojob.git", "https://git.example/team/ppojob"),
        ("/srv/clones/ppojob", ""),
        ("file:///srv/clones/ppojob", ""),
        ("", ""),
    ],
)
def test_a_label_has_neither_credentials_nor_paths_of_a_machine(remote: str, address: str) -> None:
    assert public_address(remote) == address


def test_the_tag_is_the_version_unless_one_is_given() -> None:
    version = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]["version"]

    assert tag({}) == version
    assert tag({"TAG": "main"}) == "main"


@pytest.mark.parametrize(
    ("environment", "arguments"),
    [
        ({}, {}),
        ({"BASE": "debian:12"}, {"BASE": "debian:12"}),
        ({"UV_DEFAULT_INDEX": "u"}, {"UV_DEFAULT_INDEX": "u", "PIP_INDEX_URL": "u"}),
        ({"PIP_INDEX_URL": "p"}, {"UV_DEFAULT_INDEX": "p", "PIP_INDEX_URL": "p"}),
        ({"UV_DEFAULT_INDEX": "u", "PIP_INDEX_URL": "p"}, {"UV_DEFAULT_INDEX": "u", "PIP_INDEX_URL": "p"}),
    ],
)
def test_both_installers_read_the_mirror(environment: dict[str, str], arguments: dict[str, str]) -> None:
    assert mirrors(environment) == arguments


@pytest.mark.parametrize("containerfile", CONTAINERFILES)
def test_a_containerfile_declares_the_arguments_that_are_given(containerfile: str) -> None:
    text = (PROJECT / containerfile).read_text()
    given = {
        name for recipe in RECIPES.values() if recipe.containerfile == containerfile for name, _ in recipe.arguments
    }

    assert given | {"BASE", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"} == set(re.findall(r"^ARG (\w+)", text, re.MULTILINE))


@pytest.mark.parametrize("containerfile", CONTAINERFILES)
def test_a_user_that_the_image_does_not_know_has_a_name_and_a_home(containerfile: str) -> None:
    [settings] = re.findall(r"^ENV PATH=(?:.*\\\n)+.*", (PROJECT / containerfile).read_text(), re.MULTILINE)

    assert {"HOME", "USER"} <= set(re.findall(r"(\w+)=", settings))


def test_both_images_have_the_same_base_by_its_full_name() -> None:
    bases = {re.search(r"^ARG BASE=(.+)$", (PROJECT / name).read_text(), re.MULTILINE) for name in CONTAINERFILES}

    assert {match and match[1] for match in bases} == {"docker.io/library/debian:bookworm-slim"}


@pytest.mark.parametrize(
    ("containerfile", "packages"),
    [("operator/Containerfile", base.OPERATOR_PACKAGES), ("trainer_image/Containerfile", base.TRAINER_PACKAGES)],
)
def test_the_cluster_s_own_base_lacks_nothing_that_a_containerfile_would_install(
    containerfile: str, packages: tuple[str, ...]
) -> None:
    text = (PROJECT / containerfile).read_text()
    step = text[text.index("packages=;") : text.index("rm -rf /var/lib/apt/lists")]
    named = set(re.findall(r"\b(?:bash|ca-certificates|g\+\+|lib\w+1|procps|python3(?:-\w+)?)(?=[\s;:\"])", step))

    assert named - {"python3", "bash"} == set(packages) - {"python3", "bash"}


def allowed_by_dockerignore(path: str) -> bool:
    """Return whether a path goes to the build; the last rule that matches it decides."""
    is_allowed = True
    for line in (PROJECT / ".dockerignore").read_text().splitlines():
        rule = line.strip()
        if not rule or rule.startswith("#"):
            continue
        pattern = rule.removeprefix("!").removeprefix("**/")
        parents = [path, *(str(parent) for parent in Path(path).parents)]
        names = [Path(each).name for each in parents]
        if any(fnmatch(each, pattern) and each != "." for each in [*parents, *(names if "**/" in rule else [])]):
            is_allowed = rule.startswith("!")
    return is_allowed


@pytest.mark.parametrize("containerfile", CONTAINERFILES)
def test_what_a_containerfile_copies_is_sent_to_the_build(containerfile: str) -> None:
    lines = [line for line in (PROJECT / containerfile).read_text().splitlines() if line.startswith("COPY ")]
    copied = {word for line in lines for word in line.split()[1:-1]}
    requirements = {value for recipe in RECIPES.values() for name, value in recipe.arguments if name == "REQUIREMENTS"}

    for path in (copied - {"${REQUIREMENTS}"}) | requirements:
        assert (PROJECT / path).exists()
        assert allowed_by_dockerignore(path), path


@pytest.mark.parametrize(
    "path",
    [
        *(".git/config", ".venv/bin/python", ".build/uv/bin/uv", "output/run/metrics.jsonl", "tests/good_spec.py"),
        *("operator/ppojob_api/__pycache__/spec.cpython-311.pyc", "operator/ppojob_operator/stale.pyc", ".env"),
    ],
)
def test_nothing_else_is_sent(path: str) -> None:
    assert not allowed_by_dockerignore(path)


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A podman that writes its calls to this file and has the images whose name has no `missing`."""
    log = tmp_path / "calls"
    podman = tmp_path / "podman"
    podman.write_text(f'#!/bin/sh\necho "$*" >>{log}\ncase "$*" in inspect*missing*) exit 1 ;; esac\n')
    podman.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    return log


def test_images_are_tagged_for_the_registry_and_pushed_there(calls: Path) -> None:
    environment = {**os.environ, "ENGINE": "podman", "TAG": "1", "REGISTRY": "registry.example/team/"}

    assert main(["push", "operator", "trainer-cuda"], {**environment, "PUSH_OPTIONS": "--tls-verify=false"}) == 0
    assert [line for line in calls.read_text().splitlines() if not line.startswith("inspect")] == [
        "tag ppojob-operator:1 registry.example/team/ppojob-operator:1",
        "push --tls-verify=false registry.example/team/ppojob-operator:1",
        "tag ppojob-trainer-cuda:1 registry.example/team/ppojob-trainer-cuda:1",
        "push --tls-verify=false registry.example/team/ppojob-trainer-cuda:1",
    ]


@pytest.mark.parametrize(
    ("arguments", "environment", "words"),
    [
        (["push"], {}, "REGISTRY=registry.example/team make push"),
        (["push", "operator"], {"REGISTRY": "r", "TAG": "missing"}, "build it first, with `make image-operator`"),
        (["check", "trainer"], {"TAG": "missing"}, "build it first, with `make image-trainer`"),
        (["build", "reward"], {}, "there are: operator, trainer, trainer-cuda"),
    ],
)
def test_a_refusal_says_what_to_do(
    calls: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], environment: dict[str, str], words: str
) -> None:
    assert main(arguments, {**os.environ, "ENGINE": "podman", **environment}) == 1
    assert words in capsys.readouterr().err


def test_a_build_that_fails_names_the_variables_for_another_base_and_index(
    calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    calls.with_name("podman").write_text("#!/bin/sh\nexit 125\n")

    assert main(["build", "operator"], {**os.environ, "ENGINE": "podman"}) == 1
    error, remedy = capsys.readouterr().err.splitlines()
    assert error.startswith("error: exit code 125: podman build ")
    for name in ("BASE", "UV_DEFAULT_INDEX", "PIP_INDEX_URL"):
        assert name in remedy


def test_every_image_has_a_target_of_make_that_builds_it() -> None:
    makefile = (PROJECT / "Makefile").read_text()

    for name in RECIPES:
        assert f"\nimage-{name}: ## " in makefile
        assert f"python3 -m tools.images build {name}\n" in makefile
    assert f"\nIMAGES := {' '.join(RECIPES)}\n" in makefile
