"""One replica leads, the others stand by: a Lease of coordination.k8s.io, with the rules of client-go.

`main.py` makes an `Election` and runs in it what only the leader may do. Nothing here knows what that is.
"""

from ppojob_operator.leadership.election import Election, ElectionTimes
from ppojob_operator.leadership.lease import Lease, LeasePort

__all__ = ["Election", "ElectionTimes", "Lease", "LeasePort"]
