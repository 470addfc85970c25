"""The plain HTTP application of the kubelet and of Prometheus: /healthz, /readyz, /metrics. Nothing here is secret.

The kubelet's Event of a failed probe has the status code only, so the log has the reason.
"""

import logging
from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ppojob_operator.status_server.health import Health
from ppojob_operator.status_server.metrics import OperatorMetrics

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.Response]]


def probe_application(health: Health, metrics: OperatorMetrics) -> web.Application:
    """Return the application."""

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/healthz", _show("/healthz", health.live_problems))
    application.router.add_get("/readyz", _show("/readyz", health.ready_problems))
    application.router.add_get("/metrics", show_metrics)
    return application


def _show(path: str, problems: Callable[[], list[str]]) -> Handler:
    said: list[str] = []

    async def show(_: web.Request) -> web.Response:
        nonlocal said
        found = problems()
        # The words have ages, which differ in each request.
        subjects = [problem.partition(":")[0] for problem in found]
        if subjects != said:
            said = subjects
            logger.log(logging.ERROR if found else logging.INFO, "%s: %s", path, "; ".join(found or ["ok"]))
        return web.Response(text="\n".join(found or ["ok"]) + "\n", status=503 if found else 200)

    return show
