"""Answers the API server before it stores a PPOJob: the checks of `reconcile`, and what else is in the cluster.

`main.py` hands its application to the TLS server of the reports, so that every replica answers, and runs `keep_trusted`
on the leader. It decides nothing of its own, and writes nothing: a dry run is like any other question.
"""

from ppojob_operator.admission.endpoint import PATH, AdmissionEndpoint
from ppojob_operator.admission.ports import ReferencePort, TrustPort
from ppojob_operator.admission.trust import keep_trusted

__all__ = ["PATH", "AdmissionEndpoint", "ReferencePort", "TrustPort", "keep_trusted"]
