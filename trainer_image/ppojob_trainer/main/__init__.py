"""The composition root: reads a job file, connects to Ray, and plugs worker groups into the controller's ports.

`ppojob run` calls `run_job`; the operator submits `python -m ppojob_trainer.main` (`__main__`).
"""

from ppojob_trainer.main.failures import JobFailedError, failure_record
from ppojob_trainer.main.run import run_job

__all__ = ["JobFailedError", "failure_record", "run_job"]
