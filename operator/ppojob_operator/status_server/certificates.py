"""Makes the operator's own certificate authority and server certificate, and renews them. Pure but for random keys.

`certificate_store.py` keeps them in a Secret. A new authority is announced before it signs anything: it joins the
bundle when a server certificate is renewed and signs the next one, some weeks later; until then every job's ConfigMap
has got the new bundle.
"""

import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

AUTHORITY_LIFETIME = timedelta(days=3650)
AUTHORITY_RENEWAL = timedelta(days=365)
"""A new authority is made when the old one has less than this left."""
SERVER_LIFETIME = timedelta(days=90)
SERVER_RENEWAL = timedelta(days=30)
"""A new server certificate is made when the old one has less than this left."""
_CLOCK_SKEW = timedelta(hours=1)


class CertificateError(Exception):
    """Certificates that cannot be used; the message says where they are and what to do."""


@dataclass(frozen=True)
class Certificates:
    """What the HTTPS server and its clients need, all in PEM."""

    authorities: str
    """Certificates of the authorities that clients trust, the newest first."""
    certificate: str
    """The server's certificate, with intermediate ones after it."""
    key: str
    """The server's private key."""
    authority_key: str = ""
    """Private key of the newest authority; empty where somebody else signs."""

    def __repr__(self) -> str:
        """Return a text without the keys, because it may end up in a log."""
        return f"Certificates(certificate until {self.expires()})"

    def expires(self) -> datetime:
        """Return when the server's certificate ends."""
        return _first(self.certificate, "the server's certificate").not_valid_after_utc


def make(names: Sequence[str], now: datetime) -> Certificates:
    """Return a new authority and a server certificate for the DNS names and IP addresses."""
    authority, key = _make_authority(now)
    certificate, server_key = _make_server_certificate(names, authority, key, now)
    return Certificates(_pem(authority), certificate, server_key, _key_pem(key))


def renew(old: Certificates, names: Sequence[str], now: datetime) -> Certificates | None:
    """Return certificates with those that are due renewed, or None if nothing is due.

    Raises:
        CertificateError: the old ones cannot be read.
    """
    certificate = _first(old.certificate, "the server's certificate")
    if certificate.not_valid_after_utc - now > SERVER_RENEWAL and set(names) <= _names(certificate):
        return None
    authorities = [a for a in _all(old.authorities, "the authority's certificate") if a.not_valid_after_utc > now]
    if not authorities:
        return make(names, now)
    key = _load_key(old.authority_key)
    renewed, server_key = _make_server_certificate(names, authorities[0], key, now)
    if authorities[0].not_valid_after_utc - now < AUTHORITY_RENEWAL:
        authority, key = _make_authority(now)
        authorities.insert(0, authority)
    return Certificates("".join(map(_pem, authorities)), renewed, server_key, _key_pem(key))


def check(certificates: Certificates, now: datetime) -> None:
    """Check that certificates from elsewhere can be used.

    Raises:
        CertificateError: with what is wrong.
    """
    certificate = _first(certificates.certificate, "tls.crt")
    _all(certificates.authorities, "ca.crt")
    if certificate.not_valid_after_utc <= now:
        raise CertificateError(f"tls.crt ended on {certificate.not_valid_after_utc}: renew it")
    key = _load_key(certificates.key, "tls.key")
    if key.public_key() != certificate.public_key():
        raise CertificateError("tls.key does not belong to tls.crt: store the pair that was issued together")


def _make_authority(now: datetime) -> tuple[x509.Certificate, ec.EllipticCurvePrivateKey]:
    key = ec.generate_private_key(ec.SECP256R1())
    # Each authority has a different name, so that clients with two in their bundle find the right one.
    subject = _subject(f"ppojob operator authority {now:%Y-%m-%d}")
    usage = x509.KeyUsage(
        digital_signature=True, key_cert_sign=True, crl_sign=True, content_commitment=False, key_encipherment=False,
        data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
    )  # fmt: skip
    certificate = (
        _builder(subject, subject, key, now, AUTHORITY_LIFETIME)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(usage, critical=True)
        .sign(key, hashes.SHA256())
    )
    return certificate, key


def _make_server_certificate(
    names: Sequence[str], authority: x509.Certificate, authority_key: ec.EllipticCurvePrivateKey, now: datetime
) -> tuple[str, str]:
    key = ec.generate_private_key(ec.SECP256R1())
    lifetime = min(SERVER_LIFETIME, authority.not_valid_after_utc - now)
    issuer_key = x509.AuthorityKeyIdentifier.from_issuer_public_key(authority_key.public_key())
    certificate = (
        _builder(_subject(names[0][:64]), authority.subject, key, now, lifetime)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(x509.SubjectAlternativeName([_general_name(name) for name in names]), critical=False)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(issuer_key, critical=False)
        .sign(authority_key, hashes.SHA256())
    )
    return _pem(certificate), _key_pem(key)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, now: datetime, lifetime: timedelta
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _CLOCK_SKEW)
        .not_valid_after(now + lifetime)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
    )


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _general_name(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def _names(certificate: x509.Certificate) -> set[str]:
    extension = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    addresses = map(str, extension.get_values_for_type(x509.IPAddress))
    return {*extension.get_values_for_type(x509.DNSName), *addresses}


def _all(pem: str, what: str) -> list[x509.Certificate]:
    try:
        return x509.load_pem_x509_certificates(pem.encode())
    except ValueError as error:
        raise CertificateError(f"{what} is not a certificate in PEM ({error})") from error


def _first(pem: str, what: str) -> x509.Certificate:
    return _all(pem, what)[0]


def _load_key(pem: str, what: str = "the authority's key") -> ec.EllipticCurvePrivateKey:
    try:
        key = serialization.load_pem_private_key(pem.encode(), password=None)
    except (ValueError, TypeError) as error:
        raise CertificateError(f"{what} is not a private key in PEM without a password ({error})") from error
    return key  # type: ignore[return-value]


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(serialization.Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    encoding, form = serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8
    return key.private_bytes(encoding, form, serialization.NoEncryption()).decode()
