"""Keeps the webhook configuration's `caBundle` equal to that of the certificate store. The leader runs it.

A new certificate authority is in the bundle weeks before it signs anything, so a renewal fails no request. If somebody
removes the bundle, for example by an installation of the chart, it is restored within seconds.
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
    """Keep `caBundle` of the configuration's webhooks at `ca_bundle()` until `stop` is set."""
    logged = ""
    while True:
        problem = await _update_once(port, configuration, ca_bundle())
        if problem and problem != logged:
            _LOG.warning("the webhook's caBundle could not be written: %s", problem)
        logged = problem
        if await wait(stop, interval_seconds):
            return


async def _update_once(port: TrustPort, configuration: str, ca_bundle: str) -> str:
    """Write the bundle where it differs. Return the problem; empty: all webhooks have the bundle."""
    try:
        webhooks = await port.read_webhooks(configuration)
        if webhooks is None:
            return f"there is no ValidatingWebhookConfiguration {configuration}: install it with the chart"
        if any(trusted != ca_bundle for trusted in webhooks.values()):
            await port.trust(configuration, list(webhooks), ca_bundle)
            _LOG.info("wrote the caBundle of ValidatingWebhookConfiguration %s", configuration)
    except ApiError as error:
        return str(error)
    return ""
