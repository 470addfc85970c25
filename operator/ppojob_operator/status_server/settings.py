"""Settings of the status server. `main.py` fills them in from the operator's own settings."""

from dataclasses import dataclass, field
from pathlib import Path

from ppojob_operator.status_server.limits import ConnectionLimits, RequestLimits


@dataclass(frozen=True)
class StatusServerSettings:
    """Where the server listens, under which names it is known, and its limits. Times are in seconds."""

    namespace: str
    """The operator's own namespace."""
    service_name: str
    """Service in front of `port`; its DNS names are in the certificate."""
    service_port: int = 443
    """Port of that Service."""
    certificate_secret: str = "ppojob-operator-certificates"
    """Secret in which the replicas share the certificates that the operator makes itself."""
    certificate_folder: Path | None = None
    """Folder with tls.crt, tls.key and ca.crt that somebody else (cert-manager) renews. None: made by the operator."""
    host: str = "0.0.0.0"
    """Address to listen on."""
    port: int = 8443
    """HTTPS port of the reports."""
    probe_port: int = 8081
    """Plain HTTP port of /healthz, /readyz and /metrics."""
    public_url: str = ""
    """Address under which trainers reach the server. Empty: the Service's own."""
    extra_names: tuple[str, ...] = ()
    """Further DNS names and IP addresses for the certificate, for an operator outside the cluster."""
    write_interval_seconds: float = 10.0
    """Shortest time between two status writes of a job; with more than 300 jobs it grows to 30 s."""
    token_cache_seconds: float = 60.0
    """How long the API server's answer on a token is believed."""
    request_timeout_seconds: float = 10.0
    """Longest time for a report's body to arrive, and for the write of a last report."""
    certificate_check_seconds: float = 60.0
    """How often the certificates are checked."""
    connections: ConnectionLimits = field(default_factory=ConnectionLimits)
    """Connections to each port."""
    requests: RequestLimits = field(default_factory=RequestLimits)
    """Reports in work at the same time; more are refused, and the trainer sends them again."""

    @property
    def base_url(self) -> str:
        """Address under which trainers reach the server, without a path."""
        service = f"https://{self.service_name}.{self.namespace}.svc:{self.service_port}"
        return (self.public_url or service).rstrip("/")

    @property
    def server_names(self) -> tuple[str, ...]:
        """DNS names and IP addresses that the certificate must have."""
        service = f"{self.service_name}.{self.namespace}"
        names = (self.service_name, service, f"{service}.svc", f"{service}.svc.cluster.local")
        return (*names, *self.extra_names)
