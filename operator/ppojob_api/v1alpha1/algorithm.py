"""`spec.algorithm`: advantages, policy loss, dynamic sampling, the KL terms, and the correction of the rollout."""

from enum import StrEnum

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules
from ppojob_api.v1alpha1.quantities import Path, RawObject, ShortText


class AdvantageEstimator(StrEnum):
    """How advantages come from rewards."""

    GAE = "GAE"
    GRPO = "GRPO"
    DR_GRPO = "DrGRPO"
    RLOO = "RLOO"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"
    FUNCTION = "Function"


class PolicyLoss(StrEnum):
    """How the loss of a token comes from its log-probs and its advantage."""

    PPO = "PPO"
    GSPO = "GSPO"
    CISPO = "CISPO"
    FUNCTION = "Function"


GROUP_ESTIMATORS = (AdvantageEstimator.GRPO, AdvantageEstimator.DR_GRPO, AdvantageEstimator.RLOO)
"""Estimators that compare the responses to one prompt with each other."""


class UserFunction(ApiModel):
    """A Python function of the user."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(rule="has(self.module) != has(self.path)", message="set exactly one of module and path")
        )
    )

    module: ShortText | None = None
    """Dotted name of an installed module."""
    path: Path | None = None
    """Path of a Python file in the container."""
    kwargs: RawObject = Field(default_factory=dict)
    """Keyword arguments of the function."""


class AdvantageFunction(UserFunction):
    """A Python function `compute_advantages(inputs, **kwargs)`. See docs/algorithms.md."""

    name: ShortText = "compute_advantages"
    """Name of the function."""
    needs_values: bool = False
    """The function reads the critic's values, so the job has a critic."""
    needs_groups: bool = False
    """The function compares the responses to one prompt with each other."""
    whitens: bool = False
    """The advantages that it returns are whitened over the whole batch."""


class PolicyLossFunction(UserFunction):
    """A Python function `compute_policy_loss(inputs, **kwargs)`. See docs/algorithms.md."""

    name: ShortText = "compute_policy_loss"
    """Name of the function."""


class DynamicSampling(ApiModel):
    """Dynamic sampling (DAPO, Yu et al. 2025): prompts whose responses all have the same score are replaced by others
    until the batch is full, because their advantages are 0."""

    max_generation_batches: int = Field(default=10, ge=1, le=1000)
    """Maximum number of prompts that a step uses, in batches of data.trainBatchSize. If the batch is not full after
    them, the job fails with BatchNotFilled."""


class KLEstimator(StrEnum):
    """Estimators of KL(policy || reference) from log-probs (Schulman 2020)."""

    K1 = "K1"
    K2 = "K2"
    K3 = "K3"
    ABS = "Abs"


class KLControllerType(StrEnum):
    """How the coefficient of the KL reward moves."""

    FIXED = "Fixed"
    ADAPTIVE = "Adaptive"


class KLController(ApiModel):
    """The coefficient of the KL penalty in the reward."""

    type: KLControllerType = KLControllerType.FIXED
    """Fixed, or Adaptive (Ziegler et al. 2019, section 2.2)."""
    coefficient: float = Field(default=0.001, ge=0, le=1000)
    """The coefficient; for Adaptive its start."""
    target: float = Field(default=0.1, gt=0, le=1000)
    """Adaptive: the target of the KL, in nats."""
    horizon: int = Field(default=10_000, ge=1, le=2**31 - 1)
    """Adaptive: number of samples over which the coefficient adapts."""


class KL(ApiModel):
    """Where the distance to the reference policy enters."""

    in_reward: bool = False
    """Subtract the KL from the reward of each token."""
    in_loss: bool = False
    """Add the KL to the policy loss."""
    estimator: KLEstimator = KLEstimator.K1
    """Estimator of the KL in the reward."""
    loss_estimator: KLEstimator = KLEstimator.K3
    """Estimator of the KL in the loss."""
    loss_coefficient: float = Field(default=0.001, ge=0, le=1000)
    """Coefficient of the KL in the loss."""
    controller: KLController = KLController()
    """Coefficient of the KL in the reward."""


class CorrectionLevel(StrEnum):
    """What has one importance weight."""

    TOKEN = "Token"
    SEQUENCE = "Sequence"


class CorrectionMethod(StrEnum):
    """How the difference between engine and trainer is corrected."""

    TRUNCATE = "Truncate"
    MASK = "Mask"
    BYPASS = "Bypass"
    NONE = "None"


DEFAULT_LOWER = 0.5
_WITHOUT_WEIGHTS = (CorrectionMethod.BYPASS, CorrectionMethod.NONE)


class RolloutCorrection(ApiModel):
    """Correction of responses whose probabilities differ between engine and trainer: importance weights, which multiply
    the advantages in the policy loss, or the loss's own ratio."""

    method: CorrectionMethod = CorrectionMethod.TRUNCATE
    """Truncate: weights above `upper` become `upper` (truncated importance sampling). Mask: weights outside of `lower`
    and `upper` become 0, so these tokens or responses are not trained on (masked importance sampling). Bypass: no
    weights; the policy loss clips the ratio to the engine's log-probs. The trainer then computes no old log-probs,
    which saves a forward pass, and training/rollout_probs_diff_* are not known. None: no correction."""
    level: CorrectionLevel = CorrectionLevel.TOKEN
    """Token: a weight for each token; biased, low variance. Sequence: the product over the response; high variance for
    long responses."""
    upper: float = Field(default=2.0, gt=0, le=1_000_000)
    """Upper bound of the weights."""
    lower: float | None = Field(default=None, gt=0, le=1_000_000)
    """Lower bound of the weights, with method Mask only. Absent: 0.5."""

    @property
    def lower_bound(self) -> float:
        """The lower bound of method Mask."""
        return DEFAULT_LOWER if self.lower is None else self.lower


class AlgorithmSpec(ApiModel):
    """PPO (Schulman et al. 2017) and its relatives."""

    advantage_estimator: AdvantageEstimator = AdvantageEstimator.GAE
    """GAE needs a critic; GRPO, DrGRPO (Dr.GRPO), RLOO and ReinforcePlusPlus (REINFORCE++) do not. Function:
    advantageFunction."""
    advantage_function: AdvantageFunction | None = None
    """The user's own estimator, with advantageEstimator Function."""
    policy_loss: PolicyLoss = PolicyLoss.PPO
    """PPO: the clipped surrogate with dual clip. GSPO: with the ratio of a whole response (Zheng et al. 2025). CISPO: a
    clipped ratio as a weight without gradient (MiniMax 2025). Function: policyLossFunction."""
    policy_loss_function: PolicyLossFunction | None = None
    """The user's own policy loss, with policyLoss Function."""
    dynamic_sampling: DynamicSampling | None = None
    """Replace prompts whose responses all have the same score. For estimators that compare the responses to a prompt.
    Absent: all prompts are used."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of future rewards."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE (Schulman et al. 2015, equation 16)."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over each batch of rollouts."""
    kl: KL = KL()
    """Distance to the reference policy."""
    rollout_correction: RolloutCorrection | None = None
    """Correction of the difference between the policy that is trained and the one that generated. Absent: no
    correction. schedule.mode OneStepOff and rollout.quantization require this field; with OneStepOff, its method may be
    None."""

    @property
    def correction(self) -> RolloutCorrection | None:
        """The importance weights, or None if there are none."""
        given = self.rollout_correction
        return None if given is None or given.method in _WITHOUT_WEIGHTS else given

    @property
    def bypasses_old_log_probs(self) -> bool:
        """Whether the engine's log-probs take the place of those that the trainer computes before an update."""
        return self.rollout_correction is not None and self.rollout_correction.method is CorrectionMethod.BYPASS

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads values."""
        own = self.advantage_function
        return self.advantage_estimator is AdvantageEstimator.GAE or (own is not None and own.needs_values)

    @property
    def needs_groups(self) -> bool:
        """Whether the estimator compares the responses to one prompt with each other."""
        own = self.advantage_function
        return self.advantage_estimator in GROUP_ESTIMATORS or (own is not None and own.needs_groups)

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term reads the reference policy."""
        return self.kl.in_reward or self.kl.in_loss
