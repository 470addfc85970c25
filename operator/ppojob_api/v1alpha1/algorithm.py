"""`spec.algorithm`: the estimator of advantages, the KL terms, and the correction of the rollout."""

from enum import StrEnum

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel


class AdvantageEstimator(StrEnum):
    """How advantages come from rewards; only GAE needs a critic."""

    GAE = "GAE"
    GRPO = "GRPO"
    RLOO = "RLOO"
    REINFORCE_PLUS_PLUS = "ReinforcePlusPlus"


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
    """Adaptive: the KL to hold, in nats."""
    horizon: int = Field(default=10_000, ge=1, le=2**31 - 1)
    """Adaptive: over how many samples the coefficient adapts."""


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
    """What happens to weights out of bounds."""

    TRUNCATE = "Truncate"
    MASK = "Mask"
    NONE = "None"


DEFAULT_LOWER = 0.5


class RolloutCorrection(ApiModel):
    """Importance weights of responses whose probabilities differ between engine and trainer. They multiply the
    advantages in the policy loss."""

    method: CorrectionMethod = CorrectionMethod.TRUNCATE
    """Truncate: weights above `upper` become `upper` (truncated importance sampling). Mask: weights outside of `lower`
    and `upper` become 0, so these tokens or responses are not trained on (masked importance sampling). None: no
    correction."""
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
    """GAE needs a critic; GRPO, RLOO and ReinforcePlusPlus (REINFORCE++) do not."""
    gamma: float = Field(default=1.0, ge=0, le=1)
    """Discount of future rewards."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """Lambda of GAE (Schulman et al. 2015, equation 16)."""
    epochs: int = Field(default=1, ge=1, le=64)
    """Passes over each batch of rollouts."""
    kl: KL = KL()
    """Distance to the reference policy."""
    rollout_correction: RolloutCorrection | None = None
    """Correction of the difference between the policy that is trained and the one that generated. Absent: none. Use it
    with schedule.mode OneStepOff, which requires it or method None, and with quantized engines."""

    @property
    def correction(self) -> RolloutCorrection | None:
        """The correction, or None if there is none."""
        given = self.rollout_correction
        return None if given is None or given.method is CorrectionMethod.NONE else given

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads values."""
        return self.advantage_estimator is AdvantageEstimator.GAE

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term reads the reference policy."""
        return self.kl.in_reward or self.kl.in_loss
