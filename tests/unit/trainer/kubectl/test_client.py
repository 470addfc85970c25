"""kubectl as a program: what it is called with, and how its words come back."""

from pathlib import Path

import pytest

from ppojob_trainer.kubectl.client import Kubectl, KubectlError


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A program `kubectl` that says what it was called with, or fails if that is `get nothing`."""
    path = tmp_path / "kubectl"
    path.write_text('#!/bin/sh\n[ "$3" = nothing ] && { echo "error: no such kind" >&2; exit 3; }\necho "[\\"$*\\"]"\n')
    path.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    return path


def test_context_and_namespace_go_before_the_command(program: Path) -> None:
    kubectl = Kubectl(context="here", namespace="team")

    assert kubectl.get("pods", "a") == ["--context=here --namespace=team get pods a --output=json"]


def test_what_is_not_given_is_left_to_the_kubeconfig(program: Path) -> None:
    assert Kubectl().get("pods") == ["get pods --output=json"]


def test_a_refusal_has_kubectls_words(program: Path) -> None:
    with pytest.raises(KubectlError, match=r"^no such kind$"):
        Kubectl(namespace="team").get("nothing")


def test_an_attached_command_gives_its_exit_status(program: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert Kubectl(namespace="team").attach("get", "nothing") == 3
    assert "no such kind" in capfd.readouterr().err


def test_without_kubectl_the_remedy_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))

    with pytest.raises(KubectlError, match="kubectl is not on PATH"):
        Kubectl().get("pods")
