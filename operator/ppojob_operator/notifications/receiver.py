"""The client of the administrator's receiver: one POST of one CloudEvent, with a limit for its time.

`notifier.py` calls it and decides what follows. Address and credentials may be secrets: no message of this module has
more of the address than scheme, host and port, nor anything of what the receiver answers but its status. It follows no
redirect and reads no body.
"""

import asyncio
import ssl
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from ppojob_operator.notifications.cloud_event import CONTENT_TYPE
from ppojob_operator.settings import Settings, url_problem

URL_FILE, AUTHORIZATION_FILE, CA_FILE = "url", "authorization", "ca.crt"
"""Keys of the Secret that the chart mounts; each is optional."""
_PASSING = {
    HTTPStatus.UNAUTHORIZED,
    HTTPStatus.FORBIDDEN,
    HTTPStatus.REQUEST_TIMEOUT,
    HTTPStatus.TOO_EARLY,
    HTTPStatus.TOO_MANY_REQUESTS,
}
"""Refusals after which another try may help. 401 and 403: a renewed Secret arrives in the pod after a minute or so."""


class _ConfigurationError(Exception):
    """Address or credentials cannot be used; the message has neither of them."""


@dataclass(frozen=True)
class Outcome:
    """What became of one try."""

    problem: str = ""
    """Why the receiver did not accept the notification. Empty: it did."""
    is_final: bool = False
    """Another try cannot help."""
    retry_after: float | None = None
    """Seconds that the receiver asks to wait before the next try. None: it does not say."""


class Receiver:
    """The receiver that the operator's settings name. Its Secret is read at each try, so that it can be renewed."""

    def __init__(self, settings: Settings) -> None:
        self._url = settings.notification_url
        self._folder = Path(settings.notification_folder) if settings.notification_folder else None
        self._timeout = settings.notification_timeout

    async def post(self, body: bytes) -> Outcome:
        """Send a CloudEvent once."""
        try:
            url, headers, trusted = self._address(), self._headers(), self._trusted()
        except _ConfigurationError as error:
            return Outcome(str(error))
        where = _origin(url)
        try:
            async with asyncio.timeout(self._timeout), _session(trusted) as session:
                answer = await session.post(url, data=body, headers=headers, allow_redirects=False)
                # The body may be endless, and may repeat the credentials: it is not read.
                answer.close()
        except TimeoutError:
            return Outcome(f"{where}: no answer within {self._timeout:g} s")
        except (aiohttp.ClientError, OSError, ValueError) as error:
            return Outcome(f"{where}: {_words(error)}")
        return _outcome(where, answer.status, answer.headers.get("Retry-After", ""))

    def _address(self) -> str:
        url = self._read(URL_FILE) or self._url
        if not url:
            raise _ConfigurationError(f"there is no address: set notifications.url, or key {URL_FILE!r} of the Secret")
        if problem := url_problem(url):
            raise _ConfigurationError(f"the address is not valid: {problem}; change notifications.url or the Secret")
        return url

    def _headers(self) -> dict[str, str]:
        headers = {"Content-Type": CONTENT_TYPE, "User-Agent": "ppojob-operator"}
        if authorization := self._read(AUTHORIZATION_FILE):
            if not (authorization.isascii() and authorization.isprintable()):
                raise _ConfigurationError(
                    f"key {AUTHORIZATION_FILE!r} of the Secret is not one line of printable ASCII: write the value of "
                    "the header, such as 'Bearer ...'"
                )
            headers["Authorization"] = authorization
        return headers

    def _trusted(self) -> ssl.SSLContext | None:
        """Return the context that trusts the given certificate authority alone. None: those of the image."""
        authority = self._read(CA_FILE)
        try:
            return ssl.create_default_context(cadata=authority) if authority else None
        except (ssl.SSLError, ValueError) as error:
            raise _ConfigurationError(f"key {CA_FILE!r} of the Secret has no certificates as PEM") from error

    def _read(self, name: str) -> str:
        """Return the content of a key of the Secret, or nothing if it has no such key."""
        if self._folder is None:
            return ""
        try:
            return (self._folder / name).read_text().strip()
        except FileNotFoundError:
            return ""
        except (OSError, UnicodeDecodeError) as error:
            raise _ConfigurationError(f"key {name!r} of the Secret cannot be read ({type(error).__name__})") from error


def _session(trusted: ssl.SSLContext | None) -> aiohttp.ClientSession:
    """Return a session for one request: notifications are rare, and a renewed certificate authority counts at once."""
    connector = aiohttp.TCPConnector(ssl=True if trusted is None else trusted, force_close=True)
    return aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar())


def _outcome(where: str, status: int, retry_after: str) -> Outcome:
    if 200 <= status < 300:
        return Outcome()
    if 300 <= status < 400:
        words = f"{where} answered {status}: redirects are not followed; configure the final address"
        return Outcome(words, is_final=True)
    is_passing = status >= 500 or status in _PASSING
    return Outcome(f"{where} answered {status}", not is_passing, _seconds(retry_after))


def _seconds(retry_after: str) -> float | None:
    """Return the seconds of a Retry-After header, which has seconds or a date. None: it has neither."""
    if retry_after.isascii() and retry_after.isdigit():
        return float(retry_after)
    try:
        date = parsedate_to_datetime(retry_after)
    except (TypeError, ValueError):
        return None
    aware = date if date.tzinfo else date.replace(tzinfo=UTC)
    return max(0.0, (aware - datetime.now(UTC)).total_seconds())


def _origin(url: str) -> str:
    """Return scheme, host and port; the rest may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.netloc}"


def _words(error: Exception) -> str:
    """Return the cause without the address, which many messages of the client repeat."""
    cause = getattr(error, "certificate_error", None)
    words = str(cause) if cause is not None else (error.strerror or "") if isinstance(error, OSError) else ""
    return f"{type(error).__name__} {words}".rstrip()
