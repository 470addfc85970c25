"""The errors of an upload. `main` turns them into `status.model.uploadFailure`, or into the failure of an attempt."""

from ppojob_api.v1alpha1.constants import Reason


class UploadError(RuntimeError):
    """An export cannot be uploaded; the message has the address, the cause and the remedy."""

    reason = Reason.UPLOAD_FAILED


class UploadFailedError(UploadError):
    """The object store or the hub did not answer, or failed. Another try may help."""


class UploadRefusedError(UploadError):
    """The object store or the hub refuses. Another try cannot help."""

    reason = Reason.UPLOAD_REFUSED


class UploadCredentialsError(UploadRefusedError):
    """There are no credentials in the environment or on the machine."""
