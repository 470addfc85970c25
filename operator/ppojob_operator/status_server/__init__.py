"""Receives the trainers' reports of progress, proves who sends them, and writes them into the status of their PPOJob.

`main.py` starts it in the operator's loop. It decides nothing about a job: it writes what the trainer says (field
manager `ppojob-progress`) and answers with the live part of the spec.
"""

from ppojob_operator.status_server.certificates import CertificateError
from ppojob_operator.status_server.health import Health, Heartbeat
from ppojob_operator.status_server.metrics import OperatorMetrics
from ppojob_operator.status_server.ports import JobIdentity, ProgressPort, SecretPort, TokenIdentity
from ppojob_operator.status_server.server import StatusServer
from ppojob_operator.status_server.settings import StatusServerSettings

__all__ = [
    "CertificateError",
    "Health",
    "Heartbeat",
    "JobIdentity",
    "OperatorMetrics",
    "ProgressPort",
    "SecretPort",
    "StatusServer",
    "StatusServerSettings",
    "TokenIdentity",
]
