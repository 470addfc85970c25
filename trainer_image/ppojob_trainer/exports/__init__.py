"""The exported model beside its weights: chat template, model card, and the upload to `checkpoint.exportTo`.

    main/exports.py ─▶ folder.py      completes the folder that the engine wrote: chat template and model card
                    ─▶ uploads.py     uploads a folder, with retries
                         ├─ bucket_target.py    s3:// and gs://, by obstore
                         └─ hub_target.py       hf://, by huggingface_hub

Imports no torch. It reads credentials from the environment and never logs them.
"""

from ppojob_trainer.exports.errors import (
    UploadCredentialsError,
    UploadError,
    UploadFailedError,
    UploadRefusedError,
)
from ppojob_trainer.exports.folder import complete
from ppojob_trainer.exports.uploads import open_target, upload

__all__ = [
    "UploadCredentialsError",
    "UploadError",
    "UploadFailedError",
    "UploadRefusedError",
    "complete",
    "open_target",
    "upload",
]
