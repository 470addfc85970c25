"""The plain HTTP application of the kubelet and of Prometheus: /healthz, /readyz, /metrics. Nothing here is secret."""

from collections.abc import Awaitable, Callable

from aiohttp import web
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest

from ppojob_operator.status_server.health import Health
from ppojob_operator.status_server.metrics import OperatorMetrics

Handler = Callable[[web.Request], Awaitable[web.Response]]


def probe_application(health: Health, metrics: OperatorMetrics) -> web.Application:
    """Return the application."""

    async def show_metrics(_: web.Request) -> web.Response:
        return web.Response(body=generate_latest(metrics.registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    application = web.Application()
    application.router.add_get("/healthz", _show(health.live_problems))
    application.router.add_get("/readyz", _show(health.ready_problems))
    application.router.add_get("/metrics", show_metrics)
    return application


def _show(problems: Callable[[], list[str]]) -> Handler:
    async def show(_: web.Request) -> web.Response:
        found = problems()
        return web.Response(text="\n".join(found or ["ok"]) + "\n", status=503 if found else 200)

    return show
