"""Settings of the operator, read once from the environment by `main.py`.

The chart sets the variables. Each has the prefix `PPOJOB_` and the field's name in capitals; POD_NAMESPACE and POD_NAME
come from the downward API. This module reads no file and knows nothing about Kubernetes.
"""

import json
import re
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ppojob_api.v1alpha1.notification import NotificationType
from ppojob_operator.label_selector import LabelSelector
from ppojob_operator.logs import LogFormat

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]

_OWN_NAMES = {"namespace": "POD_NAMESPACE", "pod_name": "POD_NAME"}
_NAMESPACE = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")


class SettingsError(ValueError):
    """An environment variable has an invalid value; the message names the variable and what is valid."""


class DashboardAccess(StrEnum):
    """How the operator reaches a Ray head."""

    SERVICE = "Service"
    """By the DNS name of the head's Service, for an operator in the cluster."""
    POD_IP = "PodIP"
    """By the head pod's IP address, for an operator outside the cluster on a host with a route to the pods."""


class LogLevel(StrEnum):
    """Levels of Python's logging."""

    DEBUG = "DEBUG"
    INFO = "INFO"
    WARNING = "WARNING"
    ERROR = "ERROR"


def url_problem(url: str) -> str:
    """Return why a URL cannot be the address of a receiver, without the URL; empty: it can."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError:
        return "its host or port is not valid"
    if parts.scheme not in ("http", "https"):
        return "it must begin with http:// or https://"
    if not parts.hostname or port == 0 or not url.isascii() or not url.isprintable() or " " in url:
        return "it must name a host, have no spaces, and have ASCII characters only"
    if "@" in parts.netloc:
        return "it must have no user or password: put the credentials into key `authorization` of the Secret"
    return "it must have no fragment (#)" if "#" in url else ""


def _valid_url(url: str) -> str:
    if problem := url and url_problem(url):
        raise ValueError(problem)
    return url


def _valid_types(types: str) -> str:
    unknown = sorted(set(_split(types)) - set(NotificationType))
    if unknown or not _split(types):
        raise ValueError(f"unknown types {unknown}: name one or more of {', '.join(NotificationType)}")
    return types


def _parts(names: object) -> object:
    """Split the value of a variable; an empty part stays, to be refused."""
    return tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else names


def _valid_namespaces(names: tuple[str, ...]) -> tuple[str, ...]:
    invalid = [name for name in names if not _NAMESPACE.fullmatch(name)]
    if invalid:
        raise ValueError(f"{invalid} are not names of namespaces: separate the names by single commas")
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{repeated} are repeated: name each namespace once")
    return names


def _parsed(selector: object) -> object:
    """Parse the value of a variable that has JSON."""
    if not isinstance(selector, str):
        return selector
    try:
        return json.loads(selector)
    except ValueError as error:
        example = '{"matchLabels": {"ppojob.dev/enabled": "true"}}'
        raise ValueError(f"not JSON ({error}): write a LabelSelector, such as {example}") from error


def _split(names: str) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",") if name.strip())


class Settings(BaseModel):
    """The operator's settings. Times are in seconds."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    namespace: str = "ppojob-system"
    """The operator's namespace."""
    pod_name: str = "ppojob-operator"
    """The operator's pod, which Events name as their reporter."""
    watch_namespaces: Annotated[tuple[str, ...], BeforeValidator(_parts), AfterValidator(_valid_namespaces)] = ()
    """Namespaces of the PPOJobs; the variable separates them by commas. Empty: all namespaces."""
    namespace_selector: Annotated[LabelSelector, BeforeValidator(_parsed)] = LabelSelector()
    """Labels of the namespaces of the PPOJobs, instead of their names; the variable has JSON. Empty: any labels."""
    log_level: LogLevel = LogLevel.INFO
    """Level of the log."""
    log_format: LogFormat = LogFormat.TEXT
    """Format of a log line."""

    service_name: str = "ppojob-operator"
    """Service of the status endpoint."""
    service_port: Port = 443
    """Port of that Service."""
    certificate_secret: str = "ppojob-operator-certificates"
    """Secret for the certificates that the operator issues."""
    certificate_folder: str = ""
    """Folder with certificates that are issued elsewhere. Empty: the operator issues them."""
    host: str = "0.0.0.0"
    """Address that the status endpoint and the probes listen on."""
    port: Port = 8443
    """HTTPS port of the status endpoint."""
    probe_port: Port = 8081
    """HTTP port of probes and metrics."""
    public_url: str = ""
    """Address of the status endpoint as pods see it. Empty: the Service's."""
    extra_names: str = ""
    """Further names of the status endpoint for its certificate, separated by commas."""

    webhook_configuration: str = ""
    """ValidatingWebhookConfiguration of the admission webhook. Empty: there is none."""
    webhook_port: Port = 9443
    """HTTPS port of the admission webhook."""
    webhook_trust: bool = True
    """Write the CA bundle into that configuration. False: cert-manager does."""

    lease_name: str = "ppojob-operator-leader"
    """Lease of the leader election."""
    lease_duration: Annotated[int, Field(ge=1, le=3600)] = 15
    """Time after the leader's last renewal before a standby may take the Lease."""
    lease_renew_deadline: Seconds = 10.0
    """Time after its last renewal at which the leader stops leading; shorter than lease_duration."""
    lease_retry_period: Seconds = 2.0
    """Time between two tries to take or renew the Lease; shorter than lease_renew_deadline."""

    take_over_after: Seconds = 120.0
    """Time without a renewal of another operator's Lease before its jobs are taken over."""

    job_network_policy: bool = False
    """Create a NetworkPolicy for each job, which admits its own pods and the operator only."""
    operator_labels: Annotated[str, Field(pattern=r"^[^=,\s]+=[^=,\s]*(,[^=,\s]+=[^=,\s]*)*$")] = (
        "app.kubernetes.io/name=ppojob-operator"
    )
    """Labels of the operator's pods for these policies, as name=value separated by commas."""
    metrics_namespace: str = ""
    """Namespace whose pods these policies allow to scrape the jobs' metrics. Empty: none."""

    notification_url: Annotated[str, AfterValidator(_valid_url)] = ""
    """Address that gets CloudEvents about jobs, unless notification_folder has one. Empty, and no folder: none."""
    notification_folder: str = ""
    """Folder with the optional files url, authorization and ca.crt: the mounted Secret of the receiver. Empty: none."""
    notification_types: Annotated[str, AfterValidator(_valid_types)] = "succeeded,failed,retried,attention"
    """Types that are sent, separated by commas."""
    notification_cluster: Annotated[str, Field(pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$")] = (
        "kubernetes"
    )
    """Name of this cluster in the source of each event."""
    notification_timeout: Annotated[float, Field(gt=0, le=60)] = 10.0
    """Timeout of one try."""
    notification_give_up_after: Annotated[int, Field(ge=60, le=604_800)] = 86_400
    """Age at which a notification that the receiver does not accept is dropped. It is tried once at least."""

    dashboard_access: DashboardAccess = DashboardAccess.SERVICE
    """How the operator reaches Ray's dashboards."""
    dashboard_secret: str = "ppojob-operator-dashboard-key"
    """Secret with the key from which the tokens of Ray's dashboards are derived."""
    workers: Annotated[int, Field(ge=1, le=64)] = 16
    """Number of jobs reconciled at the same time. A reconcile mostly waits for the API server."""
    request_timeout: Seconds = 20.0
    """Timeout of one call to the API server or to a dashboard."""
    pass_timeout: Seconds = 120.0
    """Timeout of one reconcile; it is then retried."""
    idle_interval: Seconds = 300.0
    """Time between two resyncs, which reconcile every job without relying on the watches."""

    @model_validator(mode="after")
    def _two_never_lead(self) -> Self:
        if not self.lease_retry_period < self.lease_renew_deadline < self.lease_duration:
            raise ValueError(
                "PPOJOB_LEASE_RETRY_PERIOD < PPOJOB_LEASE_RENEW_DEADLINE < PPOJOB_LEASE_DURATION must hold; they are "
                f"{self.lease_retry_period:g}, {self.lease_renew_deadline:g} and {self.lease_duration}"
            )
        return self

    @model_validator(mode="after")
    def _namespaces_are_chosen_in_one_way(self) -> Self:
        if self.watch_namespaces and self.namespace_selector:
            raise ValueError(
                f"PPOJOB_WATCH_NAMESPACES={','.join(self.watch_namespaces)} and "
                f"PPOJOB_NAMESPACE_SELECTOR={self.namespace_selector} are both set: name the namespaces or select them "
                "by their labels, and leave the other variable empty"
            )
        return self

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """The further names of the certificate."""
        return _split(self.extra_names)

    @property
    def has_receiver(self) -> bool:
        """Whether jobs are notified to a receiver."""
        return bool(self.notification_url or self.notification_folder)

    @property
    def types_to_notify(self) -> frozenset[str]:
        """The types of notifications that are sent."""
        return frozenset(_split(self.notification_types))

    @property
    def labels_of_operator(self) -> dict[str, str]:
        """The labels of the operator's pods."""
        pairs = (pair.partition("=") for pair in self.operator_labels.split(","))
        return {name: value for name, _, value in pairs}

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "Settings":
        """Return the settings that the environment gives; an empty variable counts as not set.

        Raises:
            SettingsError: a value cannot be used.
        """
        names = {field: _OWN_NAMES.get(field, f"PPOJOB_{field.upper()}") for field in cls.model_fields}
        given = {field: environment[name] for field, name in names.items() if environment.get(name)}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            problems = [
                # A rule about several variables names them itself.
                f"{names[str(detail['loc'][0])]}{_inner(detail['loc'][1:])}={detail['input']!r}: {detail['msg']}"
                if detail["loc"]
                else detail["msg"]
                for detail in error.errors(include_url=False)
            ]
            raise SettingsError("; ".join(problems)) from error


def _inner(path: tuple[int | str, ...]) -> str:
    """Return a place within a variable that has JSON, such as `.matchExpressions[0].operator`."""
    # Pydantic adds [key] to the name of a field if the name itself is wrong.
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path if part != "[key]")
