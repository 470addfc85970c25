"""What tells the loop that a job needs a look: Kopf's watches of PPOJobs, RayClusters and pods.

`main.py` runs `Watches`. Nothing is decided and nothing is written here.
"""

from ppojob_operator.handlers.watches import Watches

__all__ = ["Watches"]
