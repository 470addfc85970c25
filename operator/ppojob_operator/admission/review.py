"""Requests and responses of AdmissionReview (admission.k8s.io/v1) for PPOJobs. Pure.

`endpoint.py` uses it. A request about another kind of object is allowed with a warning, because a webhook rule that is
too wide must not block other users.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from ppojob_api.v1alpha1 import constants
from ppojob_operator.plan import Manifest
from ppojob_operator.reading import queue_label, requested_owner

_API_VERSION = "admission.k8s.io/v1"
_KIND = "AdmissionReview"
_INVALID = {"code": 422, "reason": "Invalid"}


class ReviewError(ValueError):
    """The body is not a valid AdmissionReview; the message says why."""


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, alias_generator=to_camel, extra="ignore")


class _GroupVersionKind(_Model):
    group: str
    version: str
    kind: str


class Request(_Model):
    """The request of the API server."""

    uid: str = Field(min_length=1)
    kind: _GroupVersionKind
    operation: str
    """CREATE, UPDATE, DELETE or CONNECT."""
    namespace: str = ""
    name: str = ""
    sub_resource: str = ""
    new: dict[str, Any] | None = Field(default=None, alias="object")
    """The object to store."""
    old: dict[str, Any] | None = Field(default=None, alias="oldObject")
    """The stored object, for an update."""

    @property
    def is_ours(self) -> bool:
        """Whether it creates or updates a PPOJob."""
        ours = (constants.GROUP, constants.VERSION, constants.KIND)
        is_job = (self.kind.group, self.kind.version, self.kind.kind) == ours
        return is_job and not self.sub_resource and self.operation in ("CREATE", "UPDATE") and self.new is not None

    @property
    def job(self) -> Manifest | None:
        """The PPOJob to validate. None: nothing to validate.

        Updates that change neither the spec nor the queue's label, and updates of an object that is being deleted, are
        allowed: even a job that an older operator or nobody validated must accept new labels and lose its finalizers.
        """
        if self.new is None or not self.is_ours:
            return None
        job = self._complete(self.new)
        is_as_before = self.old is not None and _validated_fields(self.old) == _validated_fields(self.new)
        return None if is_as_before or "deletionTimestamp" in job["metadata"] else job

    @property
    def new_requested_owner(self) -> str | None:
        """The operator in a new or changed annotation. None: there is no annotation, or it is unchanged."""
        if self.new is None or not self.is_ours:
            return None
        requested = requested_owner(self._complete(self.new))
        return None if self.old is not None and requested == requested_owner(self._complete(self.old)) else requested

    @property
    def job_before(self) -> Manifest | None:
        """The stored PPOJob. None: it is new."""
        return None if self.old is None or not self.is_ours else self._complete(self.old)

    def _complete(self, raw: Mapping[str, Any]) -> Manifest:
        given = raw.get("metadata")
        metadata = {"uid": "", "generation": 1, "name": self.name, **(given if isinstance(given, dict) else {})}
        return {**raw, "metadata": {**metadata, "namespace": self.namespace}}


def _validated_fields(raw: Mapping[str, Any]) -> tuple[Any, str | None]:
    return raw.get("spec"), queue_label(raw.get("metadata") or {})


class _Review(_Model):
    api_version: str
    kind: str
    request: Request


def read(body: bytes) -> Request:
    """Return the request in a body.

    Raises:
        ReviewError: the body is not an AdmissionReview of a supported version.
    """
    try:
        review = _Review.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise ReviewError(f"{where}: {first['msg']}") from error
    if (review.api_version, review.kind) != (_API_VERSION, _KIND):
        raise ReviewError(f"{review.api_version[:50]!r} {review.kind[:50]!r}: only {_API_VERSION} {_KIND} is supported")
    return review.request


def answer(uid: str, refusal: str = "", warnings: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return the response to a request; an empty refusal allows it."""
    response: dict[str, Any] = {"uid": uid, "allowed": not refusal}
    if refusal:
        response["status"] = {**_INVALID, "message": refusal}
    if warnings:
        response["warnings"] = list(warnings)
    return {"apiVersion": _API_VERSION, "kind": _KIND, "response": response}
