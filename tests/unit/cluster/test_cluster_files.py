"""The cluster's files: certificates, filled-in templates, the pinned Go modules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from cryptography import x509

from tools.cluster import binaries, certificates, templates
from tools.cluster.addresses import API_SERVICE_IP, NODE_IP, PORTS
from tools.cluster.layout import CONFIG_TEMPLATES, GO_MODULES, Layout


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(cache=tmp_path / "cache", state=tmp_path / "state", runtime=tmp_path / "run")


def test_certificates_are_made_once_and_again_when_one_is_damaged(layout: Layout) -> None:
    assert certificates.ensure(layout) is True
    assert certificates.ensure(layout) is False
    (layout.certificates / "kubelet.crt").write_text("torn")
    assert certificates.ensure(layout) is True
    assert certificates.ensure(layout) is False


def test_every_certificate_is_signed_by_the_authority_and_names_its_hosts(layout: Layout) -> None:
    certificates.ensure(layout)
    authority = x509.load_pem_x509_certificate((layout.certificates / "ca.crt").read_bytes())
    for identity in certificates.IDENTITIES:
        certificate = x509.load_pem_x509_certificate((layout.certificates / f"{identity.name}.crt").read_bytes())
        certificate.verify_directly_issued_by(authority)
    server = x509.load_pem_x509_certificate((layout.certificates / "apiserver.crt").read_bytes())
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert {API_SERVICE_IP, NODE_IP, "127.0.0.1"} <= {str(name.value) for name in names}


def test_keys_and_kubeconfigs_are_for_their_owner_alone(layout: Layout) -> None:
    certificates.ensure(layout)
    secrets = [*layout.certificates.glob("*.key"), *layout.config.glob("*.kubeconfig")]
    assert secrets
    assert {path.name for path in secrets if path.stat().st_mode & 0o077} == set()
    assert yaml.safe_load(layout.kubeconfig.read_text())["current-context"] == "ppojob"


def test_a_template_without_a_value_is_an_error() -> None:
    with pytest.raises(KeyError, match="node_ip"):
        templates.fill("Corefile", cluster_domain="x", config="/x")


@pytest.mark.parametrize("name", sorted(path.name for path in CONFIG_TEMPLATES.iterdir()))
def test_every_template_is_used_by_a_module(name: str) -> None:
    modules = "".join(path.read_text() for path in CONFIG_TEMPLATES.parent.glob("*.py"))
    assert f'"{name}"' in modules


@pytest.mark.parametrize("module", [*binaries.MODULES, *binaries.OPTIONAL], ids=lambda module: module.name)
def test_go_modules_are_pinned_and_name_no_registry(module: binaries.GoModule) -> None:
    texts = [path.read_text() for path in module.folder.iterdir()]
    assert re.search(r"^tool ", (module.folder / "go.mod").read_text(), re.MULTILINE)
    # pause stands on the standard library alone, so it has no sums.
    assert (module.folder / "go.sum").is_file() or "require" not in (module.folder / "go.mod").read_text()
    # Split, so that this file does not hold the names either.
    hosts = [".".join(parts) for parts in (("proxy", "golang", "org"), ("sum", "golang", "org"))]
    assert [host for host in hosts if any(host in text for text in texts)] == []


def test_every_go_module_is_built() -> None:
    known = (*binaries.MODULES, *binaries.OPTIONAL)
    assert {module.name for module in known} == {path.name for path in GO_MODULES.iterdir()}


def test_the_server_calls_itself_by_the_version_that_is_pinned() -> None:
    required = re.search(r"k8s\.io/kubernetes (v[\d.]+)", (GO_MODULES / "kubernetes" / "go.mod").read_text())
    assert required is not None
    assert required[1] == binaries.KUBERNETES_VERSION


def test_a_build_is_keyed_by_the_content_of_its_module(
    layout: Layout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tool").mkdir()
    (tmp_path / "tool" / "go.mod").write_text("module a")
    monkeypatch.setattr(binaries, "GO_MODULES", tmp_path)
    module = binaries.GoModule("tool", {"tool": "tool"})
    first = binaries.built_folder(layout, module)
    assert binaries.built_folder(layout, module) == first
    (tmp_path / "tool" / "go.mod").write_text("module b")
    assert binaries.built_folder(layout, module) != first


def test_no_two_programs_share_a_port() -> None:
    assert len(PORTS) == len(set(PORTS)) == 10


def test_names_of_the_cluster_and_foreign_names_are_answered_in_separate_blocks() -> None:
    # CoreDNS asks `template`, which answers every name, before `kubernetes`.
    text = (CONFIG_TEMPLATES / "Corefile").read_text()
    own, foreign = text.split(".:53 {")
    assert "kubernetes $cluster_domain" in own
    assert "$upstream" in foreign
    assert "$upstream" not in own
