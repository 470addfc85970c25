"""Uploads an export: each operation is tried again while the target does not answer. Called by `main/exports.py`.

A restarted upload adds nothing twice: the target knows a complete export, and replaces an incomplete one.
"""

import logging
from collections.abc import Callable
from typing import Final, ParamSpec, TypeVar

from tenacity import RetryCallState, Retrying, retry_if_exception_type, stop_after_attempt, wait_exponential

from ppojob_trainer.checkpoints.address import is_address
from ppojob_trainer.exports.bucket_target import BucketTarget
from ppojob_trainer.exports.errors import UploadFailedError
from ppojob_trainer.exports.target import Export, Target

P = ParamSpec("P")
T = TypeVar("T")

_log = logging.getLogger(__name__)

ATTEMPTS: Final = 8
FIRST_WAIT_S: Final = 5.0
LONGEST_WAIT_S: Final = 120.0


def open_target(address: str) -> Target:
    """Return the target of an address: `s3://`, `gs://` or `hf://`. Nothing is asked of it yet.

    Raises:
        UploadError: the environment's settings for it cannot be used.
    """
    if is_address(address):
        return BucketTarget(address)
    # Imported only if it is used: it takes a while.
    from ppojob_trainer.exports.hub_target import HubTarget

    return HubTarget(address)


def upload(target: Target, export: Export, on_file: Callable[[], None]) -> str:
    """Upload an export, and return its address. `on_file` is called after each file.

    Raises:
        UploadRefusedError: the target refuses.
        UploadFailedError: it did not answer, or failed, `ATTEMPTS` times in a row.
    """
    if _patiently(target.begin, export):
        for name, path in export.files().items():
            _patiently(target.add, name, path)
            _log.info("uploaded %s", name)
            on_file()
    return _patiently(target.finish)


def _patiently(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    retrying = Retrying(
        retry=retry_if_exception_type(UploadFailedError),
        stop=stop_after_attempt(ATTEMPTS),
        wait=wait_exponential(multiplier=FIRST_WAIT_S, max=LONGEST_WAIT_S),
        before_sleep=_log_retry,
        reraise=True,
    )
    return retrying(work, *args, **kwargs)


def _log_retry(state: RetryCallState) -> None:
    error = state.outcome.exception() if state.outcome is not None else None
    wait_s = state.next_action.sleep if state.next_action is not None else 0.0
    _log.warning("the upload is tried again in %.0f s: %s", wait_s, error)
