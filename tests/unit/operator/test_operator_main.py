"""The process as a whole: the key that its replicas share."""

import base64
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from ppojob_operator import main
from ppojob_operator.api_server import ApiRefused, ApiUnavailable
from ppojob_operator.main import StartError, dashboard_key, read_proxy_once
from ppojob_operator.settings import Settings


class Secrets:
    """Secrets in memory; `errors` are raised one by one by reads."""

    def __init__(self, *errors: Exception) -> None:
        self.kept: dict[str, Mapping[str, Any]] = {}
        self.errors: Iterator[Exception] = iter(errors)

    async def read_secret(self, namespace: str, name: str) -> Mapping[str, Any] | None:
        if error := next(self.errors, None):
            raise error
        return self.kept.get(f"{namespace}/{name}")

    async def create_secret(self, secret: Mapping[str, Any]) -> bool:
        name = f"{secret['metadata']['namespace']}/{secret['metadata']['name']}"
        return self.kept.setdefault(name, secret) is secret

    async def replace_secret(self, secret: Mapping[str, Any]) -> bool:
        raise AssertionError("the key is never changed: running jobs have tokens that were made from it")


@pytest.fixture(autouse=True)
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(main, "_KEY_PAUSE", 0.0)


async def test_the_first_operator_makes_the_key_and_the_next_ones_read_it() -> None:
    secrets = Secrets()

    first = await dashboard_key(secrets, "ns", "key")

    assert len(first) == 32
    assert await dashboard_key(secrets, "ns", "key") == first
    assert first != await dashboard_key(Secrets(), "ns", "key")


async def test_an_api_server_that_is_busy_is_asked_again() -> None:
    assert await dashboard_key(Secrets(ApiUnavailable("503"), ApiUnavailable("503")), "ns", "key")


async def test_an_api_server_that_stays_unavailable_ends_the_operator() -> None:
    with pytest.raises(StartError, match="Secret ns/key could not be read in 30 tries: 503"):
        await dashboard_key(Secrets(*[ApiUnavailable("503")] * 99), "ns", "key")


async def test_a_missing_right_is_named() -> None:
    with pytest.raises(StartError, match="Secret ns/key: 403 no: allow the operator to get and create it"):
        await dashboard_key(Secrets(ApiRefused("403 no")), "ns", "key")


@pytest.mark.parametrize("data", [{}, {"key": ""}, {"key": base64.b64encode(b"short").decode()}])
async def test_a_secret_without_a_good_key_is_refused(data: dict[str, str]) -> None:
    secrets = Secrets()
    secrets.kept["ns/key"] = {"data": data}

    with pytest.raises(StartError, match="delete it, then it is re-created"):
        await dashboard_key(secrets, "ns", "key")


@pytest.mark.parametrize(
    ("variables", "proxy"),
    [
        ({}, None),
        ({"https_proxy": "http://proxy:3128"}, "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "10.96.0.1"}, None),
        ({"http_proxy": "http://proxy:3128"}, None),
    ],
)
def test_the_environments_proxy_is_found_once(
    variables: dict[str, str], proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("https_proxy", "HTTPS_PROXY", "http_proxy", "HTTP_PROXY", "no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    configuration = Configuration(host="https://10.96.0.1:443")

    read_proxy_once(configuration)

    assert (configuration.proxy, configuration.client_session_kwargs) == (proxy, {"trust_env": False})


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ({}, set()),
        ({"webhook_configuration": "w"}, {"webhook"}),
        ({"webhook_configuration": "w", "webhook_trust": False}, set()),
    ],
    ids=["no webhook", "ours to make trusted", "cert-manager's"],
)
def test_the_leader_writes_the_webhooks_authority_unless_somebody_else_does(
    given: dict[str, Any], parts: set[str]
) -> None:
    assert set(main._leaders_parts(Settings(namespace="ns", **given), object())) == parts  # type: ignore[arg-type]
