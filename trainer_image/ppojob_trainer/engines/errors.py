"""The named errors of the engines. `reason` is the reason in the job's status.

Raised by the engines, turned into the job's failure by `main`. The engines catch none of them.
"""

from __future__ import annotations

from typing import ClassVar

from ppojob_api.v1alpha1.constants import Reason


class EngineError(RuntimeError):
    """An engine cannot continue; the message says what is wrong and what to do."""

    reason: ClassVar[str] = Reason.TRAINER_FAILED


class ModelNotFoundError(EngineError):
    """There is no readable HuggingFace model in the folder; the message names it."""

    reason = Reason.MODEL_NOT_FOUND


class ModelUnsupportedError(EngineError):
    """The engines cannot compute the model, or it lacks something that the job needs; the message names the part."""

    reason = Reason.MODEL_MISMATCH


class EngineClassError(EngineError):
    """The user's training engine cannot be imported or created; the message begins with the field."""

    reason = Reason.INVALID_SPEC


class NonFiniteError(EngineError):
    """Too many optimizer steps in a row had a gradient that was infinite or not a number."""

    reason = Reason.NON_FINITE


class CheckpointUnreadableError(EngineError):
    """A checkpoint's folder is missing, incomplete, or of another model; the message names it."""

    reason = Reason.CHECKPOINT_UNREADABLE


class CheckpointUnwritableError(EngineError):
    """A checkpoint could not be written; the message has its folder and the storage's error."""

    reason = Reason.CHECKPOINT_UNWRITABLE


class BucketFailedError(EngineError):
    """The object store failed while a rank wrote or read its part of a checkpoint; the stored data may be complete."""

    reason = Reason.BUCKET_UNREACHABLE


class ModelMismatchError(EngineError):
    """The models do not fit the job or each other; the message has the numbers."""

    reason = Reason.MODEL_MISMATCH


class RendezvousError(EngineError):
    """The processes of a group did not find each other in time; the message says who waited where."""

    reason = Reason.PHASE_TIMEOUT


class WeightSyncError(EngineError):
    """The rollout engine's weights are not those that the trainer sent."""


class WeightLinkError(WeightSyncError):
    """One end of a weight transfer cannot reach the other any more; the message says which."""

    reason = Reason.COMMUNICATION_FAILED


class RolloutError(EngineError):
    """The rollout engine refused a request or failed to serve it."""


class WeightReceiptError(RolloutError):
    """An engine did not get the weights. The next push may succeed; until then it has none.

    address: of the node whose worker failed, in an engine of several nodes.
    """

    address: str | None = None


class EngineLostError(RolloutError):
    """vLLM's processes exited or cannot be reached; responses that are finished are still there."""

    reason = Reason.WORKER_LOST


class HostLostError(EngineLostError):
    """A host of an engine does not answer any more. Its pod may still count as ready."""


class EngineArgumentError(RolloutError):
    """vLLM or its GPU does not take a field of `rollout`; the message names it."""

    reason = Reason.INVALID_SPEC


class RolloutMemoryError(RolloutError):
    """The rollout engine found too little memory on its GPU; the message is vLLM's own."""


class RolloutHostMemoryError(RolloutError):
    """The rollout engine on CPUs found too little memory on its node; the message is vLLM's own."""


class GenerationTimeoutError(RolloutError):
    """Generation did not end in time; the message says how many sequences were left."""

    reason = Reason.PHASE_TIMEOUT
