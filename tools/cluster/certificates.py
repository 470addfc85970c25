"""The cluster's certificate authority, its certificates, and the kubeconfig files that hold them.

Called by `up`. All certificates are created again if one is missing, near its end, or names another address.
"""

from __future__ import annotations

import base64
import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tools.cluster.addresses import API_PORT, API_SERVICE_IP, NODE_IP, NODE_NAME
from tools.cluster.layout import Layout
from tools.cluster.templates import render_as

VALID_DAYS = 365
RENEW_DAYS = 30
_KUBERNETES_NAMES = ("localhost", "kubernetes", "kubernetes.default", "kubernetes.default.svc")


@dataclass(frozen=True)
class Identity:
    """One certificate: who it stands for, and (for servers) under which names and addresses."""

    name: str
    user: str
    group: str = ""
    hosts: tuple[str, ...] = ()
    has_kubeconfig: bool = True


IDENTITIES = (
    Identity(
        "apiserver",
        "kube-apiserver",
        hosts=(*_KUBERNETES_NAMES, "127.0.0.1", API_SERVICE_IP, NODE_IP),
        has_kubeconfig=False,
    ),
    Identity("apiserver-kubelet-client", "kube-apiserver-kubelet-client", "system:masters", has_kubeconfig=False),
    Identity("admin", "admin", "system:masters"),
    Identity("kubelet", f"system:node:{NODE_NAME}", "system:nodes", hosts=(NODE_NAME, "127.0.0.1", NODE_IP)),
    Identity("controller-manager", "system:kube-controller-manager"),
    Identity("scheduler", "system:kube-scheduler"),
    Identity("kube-proxy", "system:kube-proxy"),
    # These run as processes outside the cluster; their upstream roles belong to pods.
    Identity("coredns", "coredns", "system:masters"),
    Identity("kuberay", "kuberay-operator", "system:masters"),
    Identity("kwok", "kwok-controller", "system:masters"),
)


def ensure(layout: Layout) -> bool:
    """Create missing certificates; True if all were created again (running servers then have old ones)."""
    if _are_good(layout):
        return False
    layout.certificates.mkdir(parents=True, exist_ok=True)
    layout.certificates.chmod(0o700)
    authority_key = ec.generate_private_key(ec.SECP256R1())
    authority = _certificate(Identity("ca", "ppojob-test-cluster"), authority_key, authority_key, None)
    _write(layout, "ca", authority, authority_key)
    for identity in IDENTITIES:
        key = ec.generate_private_key(ec.SECP256R1())
        _write(layout, identity.name, _certificate(identity, key, authority_key, authority), key)
        if identity.has_kubeconfig:
            _write_kubeconfig(layout, identity.name)
    _write_service_account_keys(layout)
    return True


def _are_good(layout: Layout) -> bool:
    limit = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=RENEW_DAYS)
    for identity in IDENTITIES:
        try:
            certificate = x509.load_pem_x509_certificate(_path(layout, identity.name, "crt").read_bytes())
        except (OSError, ValueError):
            return False
        if certificate.not_valid_after_utc < limit or _host_names(certificate) != set(identity.hosts):
            return False
        if identity.has_kubeconfig and not _kubeconfig(layout, identity.name).is_file():
            return False
    return _path(layout, "service-account", "key").is_file()


def _host_names(certificate: x509.Certificate) -> set[str]:
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return set()
    return {str(name.value) for name in names}


def _certificate(
    identity: Identity,
    key: ec.EllipticCurvePrivateKey,
    authority_key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate | None,
) -> x509.Certificate:
    attributes = [x509.NameAttribute(NameOID.COMMON_NAME, identity.user)]
    if identity.group:
        attributes.append(x509.NameAttribute(NameOID.ORGANIZATION_NAME, identity.group))
    subject = x509.Name(attributes)
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject if authority is None else authority.subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))
        .not_valid_after(now + datetime.timedelta(days=VALID_DAYS))
        .add_extension(x509.BasicConstraints(ca=authority is None, path_length=None), critical=True)
    )
    if authority is not None:
        usages = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        builder = builder.add_extension(x509.ExtendedKeyUsage(usages), critical=False)
    if identity.hosts:
        names = [_general_name(host) for host in identity.hosts]
        builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    return builder.sign(authority_key, hashes.SHA256())


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _write(layout: Layout, name: str, certificate: x509.Certificate, key: ec.EllipticCurvePrivateKey) -> None:
    _path(layout, name, "crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    _write_key(_path(layout, name, "key"), key)


def _write_key(path: Path, key: ec.EllipticCurvePrivateKey) -> None:
    path.touch(mode=0o600)
    encoded = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    path.write_bytes(encoded)


def _write_service_account_keys(layout: Layout) -> None:
    key = ec.generate_private_key(ec.SECP256R1())
    _write_key(_path(layout, "service-account", "key"), key)
    public = key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    _path(layout, "service-account", "pub").write_bytes(public)


def _write_kubeconfig(layout: Layout, name: str) -> None:
    path = render_as(
        layout,
        "kubeconfig.yaml",
        _kubeconfig(layout, name).name,
        api_port=API_PORT,
        user=name,
        authority=_base64(_path(layout, "ca", "crt")),
        certificate=_base64(_path(layout, name, "crt")),
        key=_base64(_path(layout, name, "key")),
    )
    path.chmod(0o600)


def _base64(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()


def _path(layout: Layout, name: str, suffix: str) -> Path:
    return layout.certificates / f"{name}.{suffix}"


def _kubeconfig(layout: Layout, name: str) -> Path:
    return layout.config / f"{name}.kubeconfig"
