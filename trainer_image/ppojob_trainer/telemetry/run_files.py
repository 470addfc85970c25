"""The paths of a run's files. All code that writes or names one uses this module; it creates no files."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class RunFiles:
    """The files below a job's own folder (`job.root`)."""

    root: Path

    @property
    def metrics(self) -> Path:
        """One JSON object per step."""
        return self.root / "metrics.jsonl"

    @property
    def tensorboard(self) -> Path:
        """Folder of TensorBoard's event files."""
        return self.root / "tensorboard"

    @property
    def plot(self) -> Path:
        """Reward, KL, lengths and timing as a picture."""
        return self.root / "plot.png"

    @property
    def trace(self) -> Path:
        """Phases of the steps in Chrome's trace format."""
        return self.root / "trace.json"

    @property
    def recommendation(self) -> Path:
        """The recommendation for the layout, as a JSON object."""
        return self.root / "recommendation.json"

    @property
    def samples(self) -> Path:
        """Some responses of each step with prompt and score, one JSON object a line."""
        return self.root / "samples.jsonl"

    @property
    def profiles(self) -> Path:
        """Folder of torch's profiles and of memory snapshots."""
        return self.root / "profile"

    @property
    def logs(self) -> Path:
        """Folder with one folder per attempt: the log of the driver, and of each role's process."""
        return self.root / "logs"

    @property
    def model(self) -> Path:
        """The exported policy, a HuggingFace folder."""
        return self.root / "model"

    @property
    def models(self) -> Path:
        """Folder of the exports with `checkpoint.export: Each`."""
        return self.root / "models"

    def model_of(self, step: int) -> Path:
        """Return the policy that was exported after a step, with `checkpoint.export: Each`."""
        return self.models / f"step-{step}"

    def terminating(self, cluster: str) -> Path:
        """Return the file by which a pod of a RayCluster reports that it is being deleted."""
        return self.root / f"terminating-{cluster}"

    def stop_acknowledged(self, cluster: str) -> Path:
        """Return the file by which the driver acknowledges `terminating`: it is stopping."""
        return self.root / f"terminating-{cluster}.acknowledged"

    def run_ended(self, cluster: str) -> Path:
        """Return the file by which the driver says that its run has ended, though some of its processes are left."""
        return self.root / f"terminating-{cluster}.ended"

    def log_of(self, who: str, *, attempt: int) -> Path:
        """Return the log of one process of an attempt, such as `driver` or `actor-0`."""
        return self.logs / f"attempt-{attempt}" / f"{who}.log"
