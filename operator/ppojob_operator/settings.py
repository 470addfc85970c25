"""Settings of the operator, read once from the environment by `main.py`.

The chart sets the variables. Each has the prefix `PPOJOB_` and the field's name in capitals; POD_NAMESPACE and POD_NAME
come from the downward API. This module reads no file and knows nothing about Kubernetes.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from ppojob_operator.logs import LogFormat

Port = Annotated[int, Field(ge=1, le=65535)]
Seconds = Annotated[float, Field(gt=0)]

_OWN_NAMES = {"namespace": "POD_NAMESPACE", "pod_name": "POD_NAME"}


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


class Settings(BaseModel):
    """The operator's settings. Times are in seconds."""

    model_config = ConfigDict(frozen=True, use_attribute_docstrings=True)

    namespace: str = "ppojob-system"
    """The operator's namespace."""
    pod_name: str = "ppojob-operator"
    """The operator's pod, which Events name as their reporter."""
    watch_namespace: str = ""
    """Namespace of the PPOJobs. Empty: all namespaces."""
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

    @property
    def certificate_names(self) -> tuple[str, ...]:
        """The further names of the certificate."""
        return tuple(name.strip() for name in self.extra_names.split(",") if name.strip())

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
                f"{names[str(detail['loc'][0])]}={detail['input']!r}: {detail['msg']}"
                if detail["loc"]
                else detail["msg"]
                for detail in error.errors(include_url=False)
            ]
            raise SettingsError("; ".join(problems)) from error
