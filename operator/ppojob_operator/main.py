"""The operator's process: builds the parts, plugs them together, runs them until a signal comes.

    main thread's loop:   status server (reports, probes)   +   Loop (queue, workers)
    a thread of its own:  Kopf (watches) --- notes of jobs ---> Loop.note

Kopf has a thread of its own because it cancels, when it ends, every younger task of the event loop that it runs in,
reports in work among them. If any part ends by itself, the process ends with status 1 and is started anew.
"""

import asyncio
import base64
import contextlib
import logging
import os
import secrets
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Coroutine
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration

from ppojob_operator.api_server import ApiRefused, ApiServer, ApiUnavailable
from ppojob_operator.cluster import Cluster
from ppojob_operator.cluster_progress import ProgressCluster
from ppojob_operator.dashboard import Dashboard
from ppojob_operator.handlers import Watches
from ppojob_operator.loop import Hooks, Loop
from ppojob_operator.manifests import naming
from ppojob_operator.plan import Surroundings
from ppojob_operator.settings import Settings, SettingsError
from ppojob_operator.status_server import (
    CertificateError,
    Health,
    OperatorMetrics,
    SecretPort,
    StatusServer,
    StatusServerSettings,
)

logger = logging.getLogger(__name__)

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_KEY_BYTES = 32
_KEY_TRIES = 30
_KEY_PAUSE = 1.0
_STOP_SECONDS = 25.0
_LOOP_PULSE_SECONDS = 300.0


class StartError(Exception):
    """The operator cannot start; the message says what to do."""


def main() -> None:
    """Run the operator: the command `ppojob-operator`."""
    try:
        settings = Settings.from_environment(os.environ)
        logging.basicConfig(level=settings.log_level.value, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
        # Kopf tells of every call of a handler, and each of ours only notes a name; that it leaves the process' signals
        # alone is meant.
        logging.getLogger("kopf").setLevel(logging.WARNING)
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
        asyncio.run(run(settings))
    except (SettingsError, StartError, CertificateError) as error:
        sys.exit(f"ppojob-operator: {error}")


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        StartError: it cannot start.
        RuntimeError: one of its parts ended by itself.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _api_client() as client, aiohttp.ClientSession() as session:
        api = ApiServer(client, timeout=settings.request_timeout)
        ports = ProgressCluster(api)
        key = await dashboard_key(ports, settings.namespace, settings.dashboard_secret)
        health = Health()
        # The gauge asks the loop at each scrape, and the loop tells the metrics of each look.
        loop: Loop | None = None
        metrics = OperatorMetrics(jobs_by_phase=lambda: loop.jobs_by_phase() if loop else {})
        server = _status_server(settings, ports, health, metrics)
        await server.prepare()
        cluster = Cluster(api, reporter=settings.pod_name)
        loop = Loop(
            settings,
            cluster,
            Dashboard(session, timeout=settings.request_timeout),
            lambda job: Surroundings(server.report_url(job.namespace, job.name), server.ca_bundle(), key),
            Hooks(beat=health.pulse("loop", _LOOP_PULSE_SECONDS).beat, observe_look=metrics.observe_reconcile),
        )
        metrics.queue_depth.set_function(lambda: loop.queue_depth)
        health.check("watch", loop.watch_problem)
        watches = Watches(settings, cluster, loop.note)
        health.ready_when("watches", lambda: None if watches.is_ready else "not connected yet")
        await run_together(
            stop, {"status server": server.run(stop), "loop": loop.run(stop), "watches": watches.run(stop)}
        )


async def dashboard_key(port: SecretPort, namespace: str, name: str) -> bytes:
    """Return the key from which the tokens of Ray's dashboards are made; the first operator makes it.

    Raises:
        StartError: the Secret cannot be read, or has no key in it.
    """
    made = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": name, "namespace": namespace},
        "type": "Opaque",
        "data": {"key": base64.b64encode(secrets.token_bytes(_KEY_BYTES)).decode()},
    }
    problem = ""
    for _ in range(_KEY_TRIES):
        try:
            found = await port.read_secret(namespace, name)
            if found is not None:
                return _decode_key(found, f"{namespace}/{name}")
            await port.create_secret(made)
        except ApiUnavailable as error:
            problem = str(error)
            await asyncio.sleep(_KEY_PAUSE)
        except ApiRefused as error:
            raise StartError(f"Secret {namespace}/{name}: {error}: give the operator get and create") from error
    raise StartError(f"Secret {namespace}/{name} could not be read in {_KEY_TRIES} tries: {problem}")


def _decode_key(secret: Any, name: str) -> bytes:
    key = base64.b64decode(secret.get("data", {}).get("key", ""))
    if len(key) < _KEY_BYTES:
        raise StartError(f"Secret {name} has no `key` of at least {_KEY_BYTES} bytes: delete it, and it is made anew")
    return key


@contextlib.asynccontextmanager
async def _api_client() -> AsyncIterator[ApiClient]:
    configuration = Configuration()
    try:
        if _SERVICE_ACCOUNT.exists():
            kubernetes_config.load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
        else:
            await kubernetes_config.load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except kubernetes_config.ConfigException as error:
        raise StartError(f"no cluster: run in a pod with a service account, or set KUBECONFIG ({error})") from error
    ask_environment_once(configuration)
    async with ApiClient(configuration) as client:
        yield client


def ask_environment_once(configuration: Configuration) -> None:
    """Look now whether a proxy leads to the API server, and not in a thread at each call, which takes half its time."""
    address = urlsplit(configuration.host)
    if not urllib.request.proxy_bypass(address.netloc):
        configuration.proxy = configuration.proxy or urllib.request.getproxies().get(address.scheme)
    configuration.client_session_kwargs = {"trust_env": False}


def _status_server(
    settings: Settings, ports: ProgressCluster, health: Health, metrics: OperatorMetrics
) -> StatusServer:
    configured = StatusServerSettings(
        namespace=settings.namespace,
        service_name=settings.service_name,
        service_port=settings.service_port,
        certificate_secret=settings.certificate_secret,
        certificate_folder=Path(settings.certificate_folder) if settings.certificate_folder else None,
        host=settings.host,
        port=settings.port,
        probe_port=settings.probe_port,
        public_url=settings.public_url,
        extra_names=settings.certificate_names,
    )
    return StatusServer(
        configured,
        port=ports,
        secrets=ports,
        service_account_name=naming.service_account_name,
        health=health,
        metrics=metrics,
    )


async def run_together(stop: asyncio.Event, parts: dict[str, Coroutine[Any, Any, None]]) -> None:
    """Run the parts until `stop` is set; then give them time to end in order.

    Raises:
        RuntimeError: a part ended by itself, or did not end in time.
    """
    tasks = {asyncio.create_task(part, name=name) for name, part in parts.items()}
    first, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    was_asked = stop.is_set()
    stop.set()
    done, late = await asyncio.wait(tasks, timeout=_STOP_SECONDS)
    for task in late:
        task.cancel()
    await asyncio.gather(*late, return_exceptions=True)
    for task in done:
        if (error := task.exception()) is not None:
            raise RuntimeError(f"{task.get_name()} failed") from error
    if not was_asked:
        raise RuntimeError(f"{_names(first)} ended by itself")
    if late:
        raise RuntimeError(f"{_names(late)} did not end in {_STOP_SECONDS:g} s")
    logger.info("stopped in order")


def _names(tasks: set[asyncio.Task[None]]) -> str:
    return ", ".join(sorted(task.get_name() for task in tasks))


if __name__ == "__main__":
    main()
