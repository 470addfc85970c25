"""`spec`: everything a user may ask of a PPOJob.

The operator and the trainer read it through `validation.parse_spec`; the CRD is generated from it. Rules that
span fields are in `rules.py`, each in CEL and in Python.
"""

from typing import Annotated, Any

from pydantic import Field

from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.data import DataSpec
from ppojob_api.v1alpha1.model import ModelSpec
from ppojob_api.v1alpha1.pools import Head, Placement, Pool, Pools
from ppojob_api.v1alpha1.quantities import ObjectName, RawObjects
from ppojob_api.v1alpha1.reward import RewardSpec
from ppojob_api.v1alpha1.rollout import RolloutSpec
from ppojob_api.v1alpha1.runtime import AutoBalance, Device, EnvVars, RunPolicy, Storage
from ppojob_api.v1alpha1.spelling import spelled
from ppojob_api.v1alpha1.telemetry import TelemetrySpec
from ppojob_api.v1alpha1.template_reference import TemplateRef
from ppojob_api.v1alpha1.training import ActorSpec, CheckpointSpec, CriticSpec, ScheduleSpec, TrainerSpec
from ppojob_api.v1alpha1.workers import Workers


def _in_the_first_pool(given: dict[str, Any]) -> Placement:
    """Return the placement of a spec without one; `placement_rules.py` refuses it if there are several pools."""
    return Placement(actor=given["pools"][0].name)


class PPOJobSpec(ApiModel):
    """What to train, on what, for what reward, and which GPUs each role gets."""

    template_ref: TemplateRef | None = None
    """Template that completes this spec, with the platform's defaults and limits. Absent: none."""
    image: Annotated[
        str,
        spelled(
            r"^[a-zA-Z0-9][-a-zA-Z0-9._:/@]*$",
            "must be the name of an image, such as registry.example/team/ppojob-trainer:0.3.0-dev",
            max_length=1024,
        ),
    ]
    """Trainer image of all Ray pods: a name with a tag or a digest."""
    env: EnvVars = Field(default_factory=list)
    """Environment of all Ray pods."""
    env_from: RawObjects = Field(default_factory=list)
    """Environment of all Ray pods from Secrets and ConfigMaps (core/v1 EnvFromSource)."""
    image_pull_secrets: RawObjects = Field(default_factory=list)
    """Secrets to pull the image (core/v1 LocalObjectReference)."""
    service_account_name: ObjectName | None = None
    """Existing ServiceAccount of all Ray pods, for example for a cloud's workload identity. No API token is mounted.
    Absent: the job's own ServiceAccount, which has no rights."""
    model: ModelSpec
    """Which model each role loads."""
    data: DataSpec
    """Prompts to train and to validate on."""
    reward: RewardSpec
    """How responses are scored."""
    workers: Workers = Field(default_factory=list)
    """Custom worker groups."""
    algorithm: AlgorithmSpec = AlgorithmSpec()
    """Estimator of advantages and KL terms."""
    actor: ActorSpec = ActorSpec()
    """Updating the policy."""
    critic: CriticSpec = CriticSpec()
    """Updating the value model."""
    rollout: RolloutSpec = RolloutSpec()
    """Generating responses."""
    device: Device = Device.CUDA
    """CUDA, or CPU: gloo and vLLM on CPU, in float32; gpusPerNode is then the number of worker processes per pod."""
    pools: Pools
    """Pools of GPUs; each has one kind of node."""
    head: Head = Head()
    """The Ray head pod."""
    placement: Placement = Field(default_factory=_in_the_first_pool)
    """The pool of each role. Required with several pools. Absent: every role is in the only pool."""
    schedule: ScheduleSpec = ScheduleSpec()
    """Which phases of a step run at the same time."""
    storage: Storage
    """Where models are read and results are written."""
    checkpoint: CheckpointSpec = CheckpointSpec()
    """Checkpoints and the exported model."""
    trainer: TrainerSpec = TrainerSpec()
    """Length and seed of the run."""
    telemetry: TelemetrySpec = TelemetrySpec()
    """Metrics to other services, samples, profiles."""
    auto_balance: AutoBalance = AutoBalance()
    """Automatic changes of pool sizes."""
    run_policy: RunPolicy = RunPolicy()
    """Queue, suspension, retries and deadlines."""

    def pool(self, name: str) -> Pool:
        """Return the pool of that name.

        Raises:
            KeyError: there is none; `validation.parse_spec` refuses such a spec.
        """
        return {pool.name: pool for pool in self.pools}[name]

    def engines_sleep_in(self, pool: str) -> bool:
        """Whether engines in a pool of a resolved spec give memory back outside generation: a role trains there."""
        is_shared = pool in (self.placement.actor, self.placement.critic)
        return self.device is Device.CUDA and self.rollout.sleep and is_shared
