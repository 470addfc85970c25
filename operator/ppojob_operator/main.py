"""The operator's process: creates the components, connects them, and runs them until SIGTERM or SIGINT.

    every replica:     status server (reports, probes, admission)   +   Election (the Lease)
    the leader, also:  Loop (queue, workers)  <--- enqueues jobs ---  Kopf (watches), in a separate thread

Kopf runs in a separate thread because, when it ends, it cancels every task that was created after it in its event loop,
such as reports in progress. If a component ends early, the process exits with status 1 and is restarted. A replica that
loses the Lease becomes a standby and keeps receiving reports.
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
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client import ApiClient, Configuration

from ppojob_operator import logs
from ppojob_operator.admission import AdmissionEndpoint, keep_trusted
from ppojob_operator.adoption import own_identity
from ppojob_operator.api_server import ApiRefused, ApiServer, ApiUnavailable
from ppojob_operator.cluster_admission import AdmissionCluster
from ppojob_operator.cluster_progress import ProgressCluster
from ppojob_operator.definition import log_differences
from ppojob_operator.leader_tasks import LeaderTasks, Part
from ppojob_operator.leadership import Election, ElectionTimes
from ppojob_operator.manifests import naming
from ppojob_operator.plan import JobNetwork, Surroundings
from ppojob_operator.settings import Settings, SettingsError
from ppojob_operator.status_server import (
    CertificateError,
    Health,
    OperatorMetrics,
    SecretPort,
    StatusServer,
    StatusServerSettings,
)
from ppojob_operator.supervisor import supervise

logger = logging.getLogger(__name__)

_SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount/token")
_KEY_BYTES = 32
_KEY_TRIES = 30
_KEY_PAUSE = 1.0
_ELECTION_HEARTBEAT_SECONDS = 60.0


class StartError(Exception):
    """The operator cannot start; the message says what to do."""


def main() -> None:
    """Run the operator: the command `ppojob-operator`."""
    try:
        settings = Settings.from_environment(os.environ)
        logs.set_up(settings.log_level.value, settings.log_format)
        # Kopf logs each call of a handler, and ours only enqueue a key. It also warns that it does not handle signals,
        # which is intended.
        logging.getLogger("kopf").setLevel(logging.WARNING)
        logging.getLogger("kopf._core.reactor.running").setLevel(logging.ERROR)
        asyncio.run(run(settings))
    except (SettingsError, StartError, CertificateError) as error:
        sys.exit(f"ppojob-operator: {error}")


async def run(settings: Settings) -> None:
    """Run until SIGTERM or SIGINT.

    Raises:
        StartError: it cannot start.
        RuntimeError: a component ended early.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with _api_client() as client, aiohttp.ClientSession() as session:
        metrics = OperatorMetrics()
        api = ApiServer(client, timeout=settings.request_timeout, count=metrics.count_api_request)
        own = own_identity(settings)
        await log_differences(api, own.version)
        ports = ProgressCluster(api)
        key = await dashboard_key(ports, settings.namespace, settings.dashboard_secret)
        health = Health()
        server = _status_server(settings, ports, health, metrics)
        if settings.webhook_configuration:
            endpoint = AdmissionEndpoint(AdmissionCluster(api), own, metrics.count_review)
            server.serve_beside(settings.webhook_port, endpoint.application())
        await server.prepare()
        network = _job_network(settings)
        leader_tasks = LeaderTasks(
            settings,
            api,
            session,
            lambda job: Surroundings(server.report_url(job.namespace, job.name), server.ca_bundle(), key, network),
            health,
            metrics,
            _leaders_parts(settings, server),
        )
        election = _election(settings, api, health)
        metrics.ask(
            job_states=leader_tasks.job_states,
            queue_depth=lambda: leader_tasks.queue_depth,
            left_alone=lambda: leader_tasks.num_left_alone,
            leads=lambda: election.leads,
        )
        leading = election.run(stop, lambda over: leader_tasks.run(over, election.check))
        await supervise(stop, {"status server": server.run(stop), "election": leading})
    logger.info("stopped gracefully")


def _leaders_parts(settings: Settings, server: StatusServer) -> dict[str, Part]:
    """Return the leader's tasks besides the reconcile loop."""
    name = settings.webhook_configuration
    if not name or not settings.webhook_trust:
        return {}
    return {"webhook": lambda api, stop: keep_trusted(AdmissionCluster(api), name, server.ca_bundle, stop)}


def _job_network(settings: Settings) -> JobNetwork | None:
    if not settings.job_network_policy:
        return None
    return JobNetwork(settings.namespace, settings.labels_of_operator, settings.metrics_namespace)


def _election(settings: Settings, api: ApiServer, health: Health) -> Election:
    election = Election(
        api,
        (settings.namespace, settings.lease_name),
        # A restarted container has the same pod name, and the old process may still be running.
        f"{settings.pod_name}_{secrets.token_hex(4)}",
        ElectionTimes(settings.lease_duration, settings.lease_renew_deadline, settings.lease_retry_period),
        beat=health.heartbeat("election", _ELECTION_HEARTBEAT_SECONDS).beat,
    )
    health.ready_when("election", lambda: "the Lease could not be read yet" if election.leader is None else None)
    return election


async def dashboard_key(port: SecretPort, namespace: str, name: str) -> bytes:
    """Return the key from which the tokens of Ray's dashboards are derived; create it if it does not exist.

    Raises:
        StartError: the Secret cannot be read, or has no valid key.
    """
    secret = {
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
            await port.create_secret(secret)
        except ApiUnavailable as error:
            problem = str(error)
            await asyncio.sleep(_KEY_PAUSE)
        except ApiRefused as error:
            raise StartError(f"Secret {namespace}/{name}: {error}: allow the operator to get and create it") from error
    raise StartError(f"Secret {namespace}/{name} could not be read in {_KEY_TRIES} tries: {problem}")


def _decode_key(secret: Any, name: str) -> bytes:
    key = base64.b64decode(secret.get("data", {}).get("key", ""))
    if len(key) < _KEY_BYTES:
        raise StartError(f"Secret {name} has no `key` of at least {_KEY_BYTES} bytes: delete it, then it is re-created")
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
    read_proxy_once(configuration)
    async with ApiClient(configuration) as client:
        yield client


def read_proxy_once(configuration: Configuration) -> None:
    """Read the proxy settings once. The client would read them in a thread at each call, half of the call's time."""
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
        fetch_job_name=naming.fetch_job_name,
        health=health,
        metrics=metrics,
    )


if __name__ == "__main__":
    main()
