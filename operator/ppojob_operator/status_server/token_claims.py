"""What a token says of itself, before anybody has checked its signature: enough to refuse most bad ones. Pure.

`authentication.py` calls it first. Nothing is believed because of it: a token that has the right claims is still
reviewed by the API server.
"""

import base64
import binascii

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ppojob_api.v1alpha1.progress import progress_audience
from ppojob_operator.status_server import refusals
from ppojob_operator.status_server.ports import JobIdentity

_CLOCK_SKEW_SECONDS = 60.0
_REMEDY = "send the projected token of the job's pod, and read its file again for each report"


class _Pod(BaseModel):
    name: str = Field(min_length=1)
    uid: str = Field(min_length=1)


class _Kubernetes(BaseModel):
    namespace: str
    pod: _Pod


class _Claims(BaseModel):
    """The claims of a ServiceAccount's token that is bound to a pod."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    aud: list[str] | str
    exp: float = Field(allow_inf_nan=False)
    kubernetes: _Kubernetes = Field(alias="kubernetes.io")


def claimed_job(token: str, namespace: str, name: str, now: float) -> JobIdentity:
    """Return the job for which the token claims to be, with the uid that its audience has.

    Args:
        token: the token.
        namespace: namespace of the job that the request is about.
        name: name of that job.
        now: the time, in seconds since the epoch.

    Raises:
        Refusal: the token is not of a pod in this namespace, not for this job, or has expired.
    """
    claims = _claims(token)
    if claims is None:
        raise refusals.unauthenticated(f"the token is not a JSON Web Token of a pod's ServiceAccount: {_REMEDY}")
    if claims.exp + _CLOCK_SKEW_SECONDS < now:
        raise refusals.unauthenticated(f"the token has expired: {_REMEDY}")
    if claims.kubernetes.namespace != namespace:
        raise refusals.unauthenticated(f"the token is not of a pod in namespace {namespace}: {_REMEDY}")
    prefix = progress_audience(namespace, name, "")
    audiences = [claims.aud] if isinstance(claims.aud, str) else claims.aud
    uids = [audience.removeprefix(prefix) for audience in audiences if audience.startswith(prefix)]
    if len(uids) != 1 or not uids[0]:
        raise refusals.unauthenticated(f"the token is not for an audience {prefix}UID: {_REMEDY}")
    return JobIdentity(namespace, name, uids[0])


def _claims(token: str) -> _Claims | None:
    parts = token.split(".")
    if len(parts) != 3 or not all(parts):
        return None
    try:
        padded = parts[1] + "=" * (-len(parts[1]) % 4)
        return _Claims.model_validate_json(base64.b64decode(padded, altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, ValidationError):
        return None
