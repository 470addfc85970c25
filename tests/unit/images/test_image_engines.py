"""Which program builds the images, and what each of the three is asked to do."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tools.images.engine import PROGRAMS, Engine, find, parse
from tools.images.errors import ImageError

Install = Callable[[str, str], None]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A folder that is all of PATH, but for what a shell script needs."""
    return tmp_path


@pytest.fixture
def install(path: Path) -> Install:
    """Put a program on PATH, as a shell script."""

    def put(name: str, script: str) -> None:
        (path / name).write_text(f"#!/bin/sh\n{script}\n")
        (path / name).chmod(0o755)

    return put


def test_a_docker_without_its_daemon_is_passed_over(path: Path, install: Install) -> None:
    install("docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    install("buildah", "exit 0")

    assert find({"PATH": str(path)}) == Engine(("buildah",), "buildah")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_one_that_answers_is_taken(path: Path, install: Install, program: str) -> None:
    install(program, '[ "$1" = info ]')

    assert find({"PATH": str(path)}) == Engine((program,), program)


def test_docker_comes_before_buildah(path: Path, install: Install) -> None:
    install("docker", "exit 0")
    install("buildah", "exit 0")

    assert find({"PATH": str(path)}).program == "docker"


def test_where_none_works_each_has_its_reason(path: Path, install: Install) -> None:
    install("docker", "echo first line >&2; echo 'no daemon' >&2; exit 1")
    install("podman", "exit 125")

    with pytest.raises(ImageError) as caught:
        find({"PATH": str(path)})

    for words in ("docker: no daemon", "podman: exit code 125", "buildah: not on PATH", "ENGINE=..."):
        assert words in str(caught.value)
    assert "first line" not in str(caught.value)


def test_the_one_that_is_named_is_not_asked(path: Path) -> None:
    assert find({"PATH": str(path), "ENGINE": "podman"}) == Engine(("podman",), "podman")


@pytest.mark.parametrize(
    ("words", "command", "program"),
    [
        ("sudo docker", ("sudo", "docker"), "docker"),
        ("buildah --root '/var/my images'", ("buildah", "--root", "/var/my images"), "buildah"),
        ("/opt/bin/podman --remote", ("/opt/bin/podman", "--remote"), "podman"),
    ],
)
def test_a_command_may_have_words_before_and_behind(words: str, command: tuple[str, ...], program: str) -> None:
    assert parse(words) == Engine(command, program)


def test_another_program_is_refused_by_name() -> None:
    with pytest.raises(ImageError, match="ENGINE='kaniko' calls none of docker, podman, buildah"):
        parse("kaniko")


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_build_has_file_tag_arguments_labels_and_context(program: str) -> None:
    command = Engine((program,), program).build(
        containerfile="a/Containerfile",
        context="project",
        tag="image:1",
        arguments={"BASE": "debian:12"},
        labels={"title": "an image"},
        options=("--no-cache",),
    )

    expected = ["--no-cache", "--build-arg=BASE=debian:12", "--label=title=an image", "--file=a/Containerfile"]
    layers = ["--layers"] if program == "buildah" else []
    assert command == [program, "build", *layers, *expected, "--tag=image:1", "project"]


@pytest.mark.parametrize("program", ["docker", "podman"])
def test_a_program_in_a_container_reads_standard_input_and_leaves_nothing(program: str) -> None:
    script = Engine((program,), program).script("image:1", "5:0", ["python", "-", "trainer"])

    options = "--rm --interactive --user=5:0 --entrypoint=python"
    assert script == f"{program} run {options} image:1 - trainer"


RECORDER = """
echo "$*" >>"$LOG"
case "$1" in
  from) echo the-container ;;
  run) cat >>"$LOG"; exit 7 ;;
esac
"""


def test_a_container_of_buildah_goes_also_when_its_program_fails(path: Path, install: Install) -> None:
    install("buildah", RECORDER)
    log = path / "log"
    environment = {"PATH": f"{path}{os.pathsep}{os.environ['PATH']}", "LOG": str(log)}

    script = Engine(("buildah",), "buildah").script("image:1", "5:0", ["python", "-"])
    done = subprocess.run(["sh", "-c", script], env=environment, input="the input\n", text=True, check=False)

    assert done.returncode == 7
    assert log.read_text().splitlines() == [
        "from --pull=false image:1",
        "run --user=5:0 the-container -- python -",
        "the input",
        "rm the-container",
    ]
