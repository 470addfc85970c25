"""Keeps the API server's trust in the webhook: who signs our certificate is in the configuration. The leader runs it.

The authorities of the configuration follow those of the certificate store. A new authority is announced there weeks
before it signs anything, so a renewal refuses no request; and who takes the entry out, such as an installation of the
chart from scratch, gets it back within seconds.
"""

import asyncio
import logging
from collections.abc import Callable

from ppojob_operator.admission.ports import TrustPort
from ppojob_operator.api_server import ApiError
from ppojob_operator.work_queue import wait

_LOG = logging.getLogger(__name__)
_INTERVAL_SECONDS = 10.0


async def keep_trusted(
    port: TrustPort,
    configuration: str,
    ca_bundle: Callable[[], str],
    stop: asyncio.Event,
    interval_seconds: float = _INTERVAL_SECONDS,
) -> None:
    """Keep the configuration's webhooks trusting `ca_bundle()` until `stop` is set."""
    said = ""
    while True:
        problem = await _update_once(port, configuration, ca_bundle())
        if problem and problem != said:
            _LOG.warning("the webhook's certificate could not be made trusted: %s", problem)
        said = problem
        if await wait(stop, interval_seconds):
            return


async def _update_once(port: TrustPort, configuration: str, ca_bundle: str) -> str:
    """Return what is wrong; nothing: all webhooks trust the bundle."""
    try:
        webhooks = await port.read_webhooks(configuration)
        if webhooks is None:
            return f"there is no ValidatingWebhookConfiguration {configuration}: the chart makes it"
        if any(trusted != ca_bundle for trusted in webhooks.values()):
            await port.trust(configuration, list(webhooks), ca_bundle)
            _LOG.info("ValidatingWebhookConfiguration %s trusts the operator's certificates", configuration)
    except ApiError as error:
        return str(error)
    return ""
