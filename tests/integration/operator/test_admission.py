"""The admission webhook on the real API server, which reaches the operator's replicas by an address of this machine."""

import base64
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from ppojob_api.v1alpha1.constants import Condition, Reason
from ppojob_operator.status_server import StatusServerSettings, certificates
from tests.bad_specs import BAD_SPECS, BadSpec, with_changes
from tests.integration.conftest import POLICY_DENIED
from tests.integration.operator.conftest import RELEASE, OperatorProcess, Rights, pool, render_chart
from tests.integration.operator.hiding_proxy import HidingProxy
from tests.integration.operator.test_used_rights import rights_of

VALUES = ("webhook.enabled=true", "webhook.timeoutSeconds=30")
HOST_NETWORK = {"spec": {"hostNetwork": True}}
DENIED = 'admission webhook "ppojobs.ppojob.dev" denied the request: '
WORDS = "podTemplate.spec.hostNetwork: True: use network.hostNetwork of the pool"
UNREAD = ("no answer within", "the API server did not answer")
"""What the operator says of an object that it could not read."""
_LIMIT_SECONDS = 180


class Webhook:
    """The chart's configuration, led to a replica of this machine."""

    def __init__(self, kubectl: Any) -> None:
        self.kubectl = kubectl
        self.name = f"{kubectl.namespace}-{RELEASE}"

    def patch(self, path: str, value: Any) -> None:
        """Replace a part of the webhook."""
        patch = json.dumps([{"op": "replace", "path": f"/webhooks/0/{path}", "value": value}])
        self.kubectl("patch", "validatingwebhookconfiguration", self.name, "--type=json", f"--patch={patch}")

    def bundle(self) -> str:
        """Return whom the API server trusts."""
        found = self.kubectl.json("get", "validatingwebhookconfiguration", self.name)["webhooks"][0]
        return str(found["clientConfig"].get("caBundle", ""))

    def lead_to(self, replica: OperatorProcess) -> None:
        """Lead it to a replica, without a certificate that would be trusted, and wait until it answers."""
        port = replica.environment["PPOJOB_WEBHOOK_PORT"]
        self.patch("clientConfig", {"url": f"https://127.0.0.1:{port}/validate"})
        self.until_answered()

    def until_answered(self) -> None:
        """Wait until what only the webhook refuses is refused."""
        end = time.monotonic() + _LIMIT_SECONDS
        while DENIED not in self.ask(bad("probe")).stderr:
            assert time.monotonic() < end, f"the API server was not led to the webhook within {_LIMIT_SECONDS} s"
            time.sleep(0.3)

    def ask(self, manifest: dict[str, Any]) -> Any:
        """Create nothing, and return what kubectl says."""
        return self.kubectl.run("create", "--dry-run=server", "--filename=-", stdin=json.dumps(manifest))


def job(name: str, **spec: Any) -> dict[str, Any]:
    changes = {("spec", part): value for part, value in spec.items()}
    return with_changes({("metadata", "name"): name, **changes})


def bad(name: str) -> dict[str, Any]:
    """Return a job that the API server itself takes."""
    return job(name, head={"podTemplate": HOST_NETWORK})


@pytest.fixture(scope="module")
def chart_values() -> tuple[str, ...]:
    return VALUES


@pytest.fixture(scope="module")
def proxy(rights: Rights) -> Iterator[HidingProxy]:
    with rights.proxy() as proxy:
        yield proxy


@pytest.fixture(scope="module")
def replicas(
    rights: Rights, proxy: HidingProxy, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[list[OperatorProcess]]:
    """Two operators, the first of which leads."""
    made = [
        rights.operator_behind(proxy, tmp_path_factory.mktemp("operator"), PPOJOB_EXTRA_NAMES="127.0.0.1")
        for _ in range(2)
    ]
    try:
        for replica in made:
            replica.start()
        yield made
    finally:
        for replica in made:
            if replica.process is not None and replica.process.poll() is None:
                replica.stop()


@pytest.fixture(scope="module")
def operator(replicas: list[OperatorProcess]) -> OperatorProcess:
    return replicas[0]


@pytest.fixture(scope="module")
def webhook(kubectl: Any, replicas: list[OperatorProcess]) -> Webhook:
    webhook = Webhook(kubectl)
    webhook.lead_to(replicas[0])
    return webhook


def test_every_replica_answers_and_the_leader_makes_it_trusted(
    webhook: Webhook, replicas: list[OperatorProcess]
) -> None:
    for replica in reversed(replicas):
        before = replica.log.read_text().count("refused CREATE")
        webhook.lead_to(replica)

        assert webhook.bundle()
        # For a moment the API server may still ask the replica that it was led to before.
        end = time.monotonic() + _LIMIT_SECONDS
        while replica.log.read_text().count("refused CREATE") <= before:
            assert time.monotonic() < end, f"the API server was not led to this replica within {_LIMIT_SECONDS} s"
            webhook.until_answered()
            time.sleep(0.3)


@pytest.mark.parametrize("mistake", [b for b in BAD_SPECS if not b.server_refuses], ids=lambda b: b.name)
def test_what_the_api_server_lets_through_is_refused_at_once(kubectl: Any, webhook: Webhook, mistake: BadSpec) -> None:
    done = kubectl.apply(mistake.manifest())

    assert done.returncode != 0
    assert DENIED in done.stderr
    assert mistake.path in done.stderr
    assert mistake.says in done.stderr


def test_a_bad_job_is_refused_with_path_value_and_remedy_and_is_not_stored(kubectl: Any, webhook: Webhook) -> None:
    done = kubectl.apply(bad("refused"))

    assert f"{DENIED}spec.head.{WORDS}" in done.stderr
    assert kubectl.run("get", "ppojob", "refused").returncode != 0


def test_missing_objects_and_questionable_values_are_warnings_that_kubectl_prints(
    kubectl: Any, webhook: Webhook
) -> None:
    template = {"spec": {"priorityClassName": "no-such", "runtimeClassName": "none"}}
    manifest = job(
        "questionable",
        checkpoint={"everySteps": 0},
        head={"podTemplate": template},
        envFrom=[{"configMapRef": {"name": "gone"}}],
        serviceAccountName="nobody",
        runPolicy={"queueName": "gpus", "queuePriorityClass": "soon"},
    )

    end, done = time.monotonic() + _LIMIT_SECONDS, kubectl.apply(manifest)
    kubectl("delete", "ppojob", "questionable", "--ignore-not-found")
    # The operator gives the API server two seconds for each object.
    while any(words in done.stderr for words in UNREAD) and time.monotonic() < end:
        done = kubectl.apply(manifest)
        kubectl("delete", "ppojob", "questionable", "--ignore-not-found")

    assert done.returncode == 0, done.stderr
    assert {line.partition("Warning: ")[2].rpartition(": ")[0] for line in done.stderr.splitlines()} == {
        "spec.checkpoint.everySteps: 0: no checkpoint is saved before the end, so after a failure the job restarts at "
        "its first step",
        "spec.storage.claimName: 'ppojob-data': there is no such claim in namespace " + kubectl.namespace,
        "spec.serviceAccountName: 'nobody': there is no such ServiceAccount in namespace " + kubectl.namespace,
        # Nor is Kueue there itself; the condition Accepted says so.
        "spec.runPolicy.queueName: 'gpus': there is no such LocalQueue in namespace " + kubectl.namespace,
        "spec.runPolicy.queuePriorityClass: 'soon': there is no such WorkloadPriorityClass",
        "spec.envFrom[0].configMapRef.name: 'gone': there is no such ConfigMap in namespace " + kubectl.namespace,
        "spec.head.podTemplate.spec.priorityClassName: 'no-such': there is no such PriorityClass",
        "spec.head.podTemplate.spec.runtimeClassName: 'none': there is no such RuntimeClass",
    }


def test_a_claim_that_can_never_do_is_refused(kubectl: Any, webhook: Webhook) -> None:
    claim = {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": "for-one-pod", "namespace": kubectl.namespace},
        "spec": {"accessModes": ["ReadWriteOncePod"], "resources": {"requests": {"storage": "1Gi"}}},
    }
    kubectl.create(claim)

    end, said = time.monotonic() + _LIMIT_SECONDS, ""
    # The operator gives the API server two seconds for each object.
    while (not said or any(words in said for words in UNREAD)) and time.monotonic() < end:
        said = webhook.ask(job("never", storage={"claimName": "for-one-pod"})).stderr

    assert "'for-one-pod': the claim is ReadWriteOncePod, and all pods write to it: use one that is" in said


def test_a_dry_run_is_judged_and_leaves_nothing_behind(kubectl: Any, webhook: Webhook) -> None:
    done = webhook.ask(job("dry", checkpoint={"everySteps": 0}))

    assert done.returncode == 0, done.stderr
    assert "Warning: spec.checkpoint.everySteps: 0" in done.stderr
    assert kubectl.run("get", "ppojob", "dry").returncode != 0


@pytest.mark.usefixtures("volumes", "claim")
def test_an_edit_of_a_job_that_runs_is_refused_with_the_reason_and_a_label_is_not(
    kubectl: Any, webhook: Webhook, jobs: Any
) -> None:
    name = jobs.create()
    jobs.wait_for(name, Condition.ACCEPTED, "True", Reason.VALID)

    def edit(change: dict[str, Any]) -> str:
        return str(kubectl.run("patch", "ppojob", name, "--type=merge", f"--patch={json.dumps(change)}").stderr)

    pools = [pool("actor", podTemplate=HOST_NETWORK), pool("critic")]
    assert f"{DENIED}spec.pools[0].{WORDS}" in edit({"spec": {"pools": pools}})
    assert f'{POLICY_DENIED}spec.device: "CUDA": cannot change once the job is accepted' in edit(
        {"spec": {"device": "CUDA"}}
    )
    assert edit({"metadata": {"labels": {"team": "rl"}}}) == ""


def test_the_role_is_the_least_that_works(kubectl: Any, webhook: Webhook, proxy: HidingProxy) -> None:
    """It runs after the tests above, which make the operator use what it has."""
    chart = render_chart(kubectl.namespace, *VALUES)
    added = rights_of(chart) - rights_of(render_chart(kubectl.namespace))

    assert added <= proxy.used
    assert {right for right in proxy.used if not right.resource.startswith("/")} <= rights_of(chart)


@contextmanager
def nobody_there(replicas: list[OperatorProcess]) -> Iterator[None]:
    """Stop all replicas, and start them again."""
    for replica in replicas:
        replica.stop()
    try:
        yield
    finally:
        for replica in replicas:
            replica.start()


def test_without_a_replica_it_fails_open_or_closed_as_the_value_says(
    kubectl: Any, webhook: Webhook, replicas: list[OperatorProcess]
) -> None:
    with nobody_there(replicas):
        is_open = webhook.ask(bad("open"))
        webhook.patch("failurePolicy", "Fail")
        try:
            end = time.monotonic() + _LIMIT_SECONDS
            while (is_closed := webhook.ask(bad("closed"))).returncode == 0 and time.monotonic() < end:
                time.sleep(0.3)
        finally:
            webhook.patch("failurePolicy", "Ignore")

    assert is_open.returncode == 0, is_open.stderr
    assert 'failed calling webhook "ppojobs.ppojob.dev"' in is_closed.stderr


def test_a_renewal_by_a_new_authority_refuses_no_request(
    kubectl: Any, webhook: Webhook, replicas: list[OperatorProcess]
) -> None:
    with nobody_there(replicas):
        data = almost_due(kubectl.namespace)
        kubectl("patch", "secret", f"{RELEASE}-certificates", f"--patch={json.dumps({'data': data})}")
    webhook.lead_to(replicas[0])
    webhook.patch("failurePolicy", "Fail")
    try:
        end, said = time.monotonic() + _LIMIT_SECONDS, []
        while served(kubectl) == data["tls.crt"] and time.monotonic() < end:
            said.append(webhook.ask(bad("again")).stderr)
        # The replica takes the new certificate into use at the moment when it has stored it, or a check later.
        said += [webhook.ask(bad("after")).stderr for _ in range(10)]
    finally:
        webhook.patch("failurePolicy", "Ignore")

    assert served(kubectl) != data["tls.crt"], "the certificate was not renewed"
    assert [words for words in said if DENIED not in words] == []


def served(kubectl: Any) -> str:
    """Return the server's certificate in the Secret."""
    return str(kubectl.json("get", "secret", f"{RELEASE}-certificates")["data"]["tls.crt"])


def almost_due(namespace: str) -> dict[str, str]:
    """Return certificates of an old authority that are due in seconds; the next one is announced and will sign."""
    names = StatusServerSettings(namespace=namespace, service_name=RELEASE, extra_names=("127.0.0.1",)).server_names
    now = datetime.now(UTC)
    old = certificates.make(names, now - timedelta(days=3350))
    lifetime = certificates.SERVER_LIFETIME - certificates.SERVER_RENEWAL
    kept = certificates.renew(old, names, now - lifetime + timedelta(seconds=25))
    assert kept is not None
    fields = {
        "ca.crt": kept.authorities,
        "tls.crt": kept.certificate,
        "tls.key": kept.key,
        "ca.key": kept.authority_key,
    }
    return {name: base64.b64encode(value.encode()).decode() for name, value in fields.items()}
