"""Policy: images that no further try can pull, because the name is invalid or the registry refuses it.

`deadlines` and `fetching` call it. The kubelet repeats each pull for ever. A job that has never run fails early instead
of at its startup deadline. A job that has run keeps waiting: `spec.image` may be corrected meanwhile.
"""

from datetime import datetime, timedelta

from ppojob_api.v1alpha1.constants import Reason
from ppojob_operator.plan import Pod
from ppojob_operator.reconcile.situation import Situation

_INVALID = "InvalidImageName"
"""The kubelet's reason for a name that no registry can have."""
_PATIENCE = timedelta(seconds=120)
"""Time for tokens and mirrors of a registry, which may refuse an image for a moment."""
_REFUSALS = (
    *("not found", "manifest unknown", "name unknown", "unauthorized", "authentication required", "403 forbidden"),
    *("access denied", "is denied", "denied:"),
)
"""Words of registries that have no such image, or do not give it to this client."""
_REMEDY = "check the image (spec.image, or that of the container in podTemplate) and spec.imagePullSecrets"


def refusal(situation: Situation) -> str:
    """Return why a pod's image cannot be pulled; empty: all can, or another try may help."""
    for pod in situation.pods:
        moment = _final_at(pod)
        if moment is not None and situation.now >= moment:
            assert pod.trouble is not None
            where = "the head" if pod.pool is None else f"pool {pod.pool}"
            return explained(f"{where}: {pod.trouble.message}")
    return ""


def next_refusal(situation: Situation) -> datetime | None:
    """Return when the first refusal of an image by a registry becomes final; None: no image is refused."""
    return min((moment for moment in map(_final_at, situation.pods) if moment is not None), default=None)


def patience(message: str) -> timedelta | None:
    """Return after which time a kubelet's message about an image is final; None: another try may help."""
    if message.startswith(_INVALID):
        return timedelta(0)
    lower = message.lower()
    return _PATIENCE if any(words in lower for words in _REFUSALS) else None


def explained(message: str) -> str:
    """Return a kubelet's message about an image with the remedy."""
    return f"an image cannot be pulled: {message}; {_REMEDY}"


def _final_at(pod: Pod) -> datetime | None:
    if pod.is_ready or pod.trouble is None or pod.trouble.reason != Reason.IMAGE_PULL_FAILED:
        return None
    since, limit = pod.scheduled or pod.created, patience(pod.trouble.message)
    return None if since is None or limit is None else since + limit
