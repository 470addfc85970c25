"""The composition root: a job file comes in, Ray is connected, worker groups are plugged into the controller's ports.

`run_job` is what `ppojob run` calls; `python -m ppojob_trainer.main` (`__main__`) is what the operator submits.
"""

from ppojob_trainer.main.failures import JobFailedError, failure_record
from ppojob_trainer.main.run import run_job

__all__ = ["JobFailedError", "failure_record", "run_job"]
