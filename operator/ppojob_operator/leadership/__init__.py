"""Leader election with a Lease of coordination.k8s.io and the rules of client-go.

`main.py` creates an `Election` and passes it the leader's tasks, about which this package knows nothing.
"""

from ppojob_operator.leadership.election import Election, ElectionTimes
from ppojob_operator.leadership.lease import Lease, LeasePort

__all__ = ["Election", "ElectionTimes", "Lease", "LeasePort"]
