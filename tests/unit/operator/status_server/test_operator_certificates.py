"""Certificates: made, shared between replicas, renewed in time, and served without a restart."""

import asyncio
import ssl
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from cryptography import x509

from ppojob_operator.api_server import ApiRefused
from ppojob_operator.status_server import CertificateError
from ppojob_operator.status_server import certificates as making
from ppojob_operator.status_server.certificate_store import CertificateStore, FolderSource, SecretSource
from ppojob_operator.status_server.certificates import Certificates

NAMES = ("ppojob-operator", "ppojob-operator.system.svc", "127.0.0.1")
SECRET = ("system", "certificates")
NOW = datetime(2026, 1, 1, tzinfo=UTC)


class Clock:
    now = NOW

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def source(cluster: Any, clock: Clock) -> SecretSource:
    return SecretSource(cluster, *SECRET, NAMES, clock)


def parse(pem: str) -> list[x509.Certificate]:
    return x509.load_pem_x509_certificates(pem.encode())


def verify(certificates: Certificates, authorities: str, when: datetime) -> None:
    """Check the server's certificate as a client would that trusts the authorities."""
    store = x509.verification.Store(parse(authorities))
    verifier = x509.verification.PolicyBuilder().store(store).time(when).build_server_verifier(x509.DNSName(NAMES[1]))
    verifier.verify(parse(certificates.certificate)[0], [])


async def handshake(context: ssl.SSLContext, authorities: str) -> bytes:
    """Connect to a server with the context and return the certificate that it shows."""
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=context)
    async with server:
        client = ssl.create_default_context(cadata=authorities)
        address = server.sockets[0].getsockname()
        reader, writer = await asyncio.open_connection(*address, ssl=client, server_hostname="ppojob-operator")
        shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
        await reader.read()
        writer.close()
        return shown


def test_a_new_certificate_is_good_for_its_names_and_its_time() -> None:
    made = making.make(NAMES, NOW)

    verify(made, made.authorities, NOW)
    verify(made, made.authorities, NOW + timedelta(days=89))
    with pytest.raises(x509.verification.VerificationError):
        verify(made, made.authorities, NOW + timedelta(days=91))


def test_keys_do_not_show_in_the_log() -> None:
    assert repr(making.make(NAMES, NOW)) == "Certificates(certificate until 2026-04-01 00:00:00+00:00)"


@pytest.mark.parametrize(("days", "is_due"), [(0, False), (59, False), (60, True), (89, True), (200, True)])
def test_the_servers_certificate_is_renewed_30_days_before_its_end(days: int, is_due: bool) -> None:
    made = making.make(NAMES, NOW)
    now = NOW + timedelta(days=days)

    renewed = making.renew(made, NAMES, now)

    assert (renewed is not None) == is_due
    if renewed:
        assert renewed.authorities == made.authorities
        verify(renewed, made.authorities, now + timedelta(days=89))


def test_a_new_name_makes_a_new_certificate() -> None:
    made = making.make(NAMES, NOW)

    renewed = making.renew(made, (*NAMES, "10.0.0.7"), NOW)

    assert renewed
    assert renewed.authorities == made.authorities


def test_a_new_authority_is_announced_long_before_it_signs() -> None:
    """Walk through twelve years, one renewal after another: who knew the bundle a month ago can verify at all times."""
    current = making.make(NAMES, NOW)
    known = {0: current.authorities}
    for day in range(1, 12 * 365, 5):
        now = NOW + timedelta(days=day)
        current = making.renew(current, NAMES, now) or current
        verify(current, current.authorities, now)
        known[day] = current.authorities
        verify(current, known[max(d for d in known if d <= max(0, day - 30))], now)

    assert len(parse(current.authorities)) == 1  # The first authority has ended and was dropped.
    assert parse(current.authorities)[0] != parse(known[0])[0]


async def test_the_first_replica_makes_the_secret_and_the_second_reads_it(source: SecretSource, cluster: Any) -> None:
    first, second = await source.read(), await source.read()

    assert first == second
    assert set(cluster.secrets[SECRET]["data"]) == {"ca.crt", "ca.key", "tls.crt", "tls.key"}
    assert cluster.secrets[SECRET]["metadata"]["resourceVersion"] == "1"


async def test_an_empty_secret_of_the_chart_is_filled_and_keeps_its_labels(source: SecretSource, cluster: Any) -> None:
    metadata = {"namespace": "system", "name": "certificates", "labels": {"a": "b"}, "resourceVersion": "7"}
    cluster.secrets[SECRET] = {"kind": "Secret", "metadata": metadata}

    made = await source.read()

    assert await source.read() == made
    assert cluster.secrets[SECRET]["metadata"]["labels"] == {"a": "b"}
    assert cluster.secrets[SECRET]["metadata"]["resourceVersion"] == "8"


async def test_replicas_that_start_together_end_up_with_the_same_certificates(cluster: Any, clock: Clock) -> None:
    class Late(SecretSource):
        """Lets another replica store first."""

        async def _store(self, secret: Any, new: Certificates) -> bool:
            if not cluster.secrets:
                await SecretSource(cluster, *SECRET, NAMES, clock).read()
            return await super()._store(secret, new)

    late = await Late(cluster, *SECRET, NAMES, clock).read()

    assert late == await SecretSource(cluster, *SECRET, NAMES, clock).read()


async def test_a_renewal_that_another_replica_made_is_taken_over(
    source: SecretSource, cluster: Any, clock: Clock
) -> None:
    old = await source.read()
    clock.now = NOW + timedelta(days=61)

    renewed = await source.read()

    assert renewed != old
    assert await SecretSource(cluster, *SECRET, NAMES, clock).read() == renewed


@pytest.mark.parametrize(
    "data", [{"tls.crt": "eA=="}, {name: "%%%" for name in ("ca.crt", "ca.key", "tls.crt", "tls.key")}]
)
async def test_a_secret_with_something_else_in_it_is_not_overwritten(
    source: SecretSource, cluster: Any, data: dict[str, str]
) -> None:
    cluster.secrets[SECRET] = {"metadata": {"resourceVersion": "1"}, "data": data}

    with pytest.raises(CertificateError, match=r"system/certificates does not hold .* delete its data"):
        await source.read()

    assert cluster.secrets[SECRET]["data"] == data


async def test_a_secret_with_certificates_that_cannot_be_read_is_named(source: SecretSource, cluster: Any) -> None:
    data = dict.fromkeys(("ca.crt", "ca.key", "tls.crt", "tls.key"), "eA==")
    cluster.secrets[SECRET] = {"metadata": {"resourceVersion": "1"}, "data": data}

    with pytest.raises(CertificateError, match=r"system/certificates.*not a certificate in PEM"):
        await source.read()


async def test_a_renewed_certificate_serves_the_next_connection(source: SecretSource, clock: Clock) -> None:
    clock.now = datetime.now(UTC) - timedelta(days=61)
    store = CertificateStore(source)
    await store.load()
    bundle = store.ca_bundle
    before = await handshake(store.context, bundle)

    clock.now = datetime.now(UTC)
    await store.load()

    assert store.ca_bundle == bundle
    assert await handshake(store.context, bundle) != before


async def test_the_certificates_in_use_stay_while_no_newer_ones_can_be_had(
    source: SecretSource, cluster: Any, caplog: pytest.LogCaptureFixture
) -> None:
    store = CertificateStore(source)
    await store.load()
    cluster.errors["read_secret"] = iter([ApiRefused("403 forbidden")])
    bundle = store.ca_bundle

    loop = asyncio.create_task(store.keep_fresh(0.01))
    async with asyncio.timeout(120):
        while "403 forbidden" not in caplog.text:
            await asyncio.sleep(0.01)
    loop.cancel()
    await asyncio.gather(loop, return_exceptions=True)

    assert store.ca_bundle == bundle
    assert "403 forbidden" in caplog.text
    assert loop.cancelled()


def test_the_bundle_cannot_be_asked_for_before_it_is_there(source: SecretSource) -> None:
    with pytest.raises(RuntimeError, match="prepare"):
        _ = CertificateStore(source).ca_bundle


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write(tmp_path, making.make(NAMES, datetime.now(UTC)))
    return tmp_path


def write(folder: Path, made: Certificates) -> None:
    (folder / "ca.crt").write_text(made.authorities)
    (folder / "tls.crt").write_text(made.certificate)
    (folder / "tls.key").write_text(made.key)


async def test_certificates_of_somebody_else_are_read_from_a_folder_again_and_again(folder: Path) -> None:
    store = CertificateStore(FolderSource(folder, lambda: datetime.now(UTC)))
    await store.load()
    before = await handshake(store.context, store.ca_bundle)

    write(folder, making.make(NAMES, datetime.now(UTC)))
    await store.load()

    assert await handshake(store.context, store.ca_bundle) != before


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "ca.crt").unlink(), "ca.crt cannot be read"),
        (lambda folder: (folder / "tls.crt").write_text("x"), "tls.crt is not a certificate in PEM"),
        (lambda folder: (folder / "tls.key").write_text("x"), "tls.key is not a private key in PEM"),
        (lambda folder: (folder / "tls.key").write_text(making.make(NAMES, NOW).key), "tls.key does not belong"),
        (lambda folder: write(folder, making.make(NAMES, NOW - timedelta(days=300))), "tls.crt ended on"),
    ],
)
async def test_files_that_cannot_be_used_are_named(folder: Path, spoil: Callable[[Path], object], words: str) -> None:
    spoil(folder)

    with pytest.raises(CertificateError, match=words) as caught:
        await FolderSource(folder, lambda: datetime.now(UTC)).read()

    assert str(folder) in str(caught.value)
