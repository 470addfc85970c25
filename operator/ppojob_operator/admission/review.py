"""AdmissionReview (admission.k8s.io/v1) as far as it concerns PPOJobs: what is asked, and the answer. Pure.

`endpoint.py` reads with it and answers with it. Whoever asks about something else than a PPOJob is answered too:
a rule of the cluster that is too wide must not stop others' work.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ppojob_api.v1alpha1 import constants
from ppojob_operator.plan import Manifest
from ppojob_operator.reconcile.reading import requested_owner

_API_VERSION = "admission.k8s.io/v1"
_KIND = "AdmissionReview"
_INVALID = {"code": 422, "reason": "Invalid"}


class ReviewError(ValueError):
    """A body that is no review; the message says what is wrong with it."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, extra="ignore")


class _GroupVersionKind(_Model):
    group: str
    version: str
    kind: str


class Request(_Model):
    """What the API server asks."""

    uid: str = Field(min_length=1)
    kind: _GroupVersionKind
    operation: str
    """CREATE, UPDATE, DELETE or CONNECT."""
    namespace: str = ""
    name: str = ""
    sub_resource: str = ""
    new: dict[str, Any] | None = Field(default=None, alias="object")
    """The object as it would be stored."""
    old: dict[str, Any] | None = Field(default=None, alias="oldObject")
    """The object as it is stored, at an update."""

    @property
    def is_ours(self) -> bool:
        """Whether it is about a new or a changed PPOJob."""
        ours = (constants.GROUP, constants.VERSION, constants.KIND)
        is_job = (self.kind.group, self.kind.version, self.kind.kind) == ours
        return is_job and not self.sub_resource and self.operation in ("CREATE", "UPDATE") and self.new is not None

    @property
    def job(self) -> Manifest | None:
        """The PPOJob that would be stored, if there is anything to be judged in it.

        An update that leaves the spec alone passes: a job that an older operator took, or nobody judged, must lose its
        finalizers and get its labels. So does that of an object which is being deleted.
        """
        if self.new is None or not self.is_ours:
            return None
        job = self._complete(self.new)
        is_as_before = self.old is not None and self.old.get("spec") == self.new.get("spec")
        return None if is_as_before or "deletionTimestamp" in job["metadata"] else job

    @property
    def new_requested_owner(self) -> str | None:
        """The operator that a new or changed annotation names; None: there is none, or it stands there already."""
        if self.new is None or not self.is_ours:
            return None
        requested = requested_owner(self._complete(self.new))
        return None if self.old is not None and requested == requested_owner(self._complete(self.old)) else requested

    @property
    def job_before(self) -> Manifest | None:
        """The PPOJob as it is stored; None: there is none yet."""
        return None if self.old is None or not self.is_ours else self._complete(self.old)

    def _complete(self, raw: Mapping[str, Any]) -> Manifest:
        given = raw.get("metadata")
        metadata = {"uid": "", "generation": 1, "name": self.name, **(given if isinstance(given, dict) else {})}
        return {**raw, "metadata": {**metadata, "namespace": self.namespace}}


class _Review(_Model):
    api_version: str
    kind: str
    request: Request


def read(body: bytes) -> Request:
    """Return what is asked.

    Raises:
        ReviewError: the body is no AdmissionReview of a version that we speak.
    """
    try:
        review = _Review.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ReviewError(f"{where}: {first['msg']}") from error
    if (review.api_version, review.kind) != (_API_VERSION, _KIND):
        raise ReviewError(f"{review.api_version[:50]!r} {review.kind[:50]!r}: only {_API_VERSION} {_KIND} is answered")
    return review.request


def answer(uid: str, refusal: str = "", warnings: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the answer to a request; an empty refusal allows it."""
    response: dict[str, Any] = {"uid": uid, "allowed": not refusal}
    if refusal:
        response["status"] = {**_INVALID, "message": refusal}
    if warnings:
        response["warnings"] = list(warnings)
    return {"apiVersion": _API_VERSION, "kind": _KIND, "response": response}
