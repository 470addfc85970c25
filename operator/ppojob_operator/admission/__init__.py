"""The validating admission webhook: the checks of `reconcile` before a PPOJob is stored.

`main.py` adds its application to the TLS server of the reports, so every replica answers, and runs `keep_trusted` on
the leader. It has no other rules and no side effects, so a dry run needs no special case.
"""

from ppojob_operator.admission.endpoint import PATH, AdmissionEndpoint
from ppojob_operator.admission.ports import ReferencePort, TrustPort
from ppojob_operator.admission.trust import keep_trusted

__all__ = ["PATH", "AdmissionEndpoint", "ReferencePort", "TrustPort", "keep_trusted"]
