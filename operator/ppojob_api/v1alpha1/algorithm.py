"""`spec.algorithm`: the estimator of advantages and the KL terms."""

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

    @property
    def needs_critic(self) -> bool:
        """Whether the estimator reads values."""
        return self.advantage_estimator is AdvantageEstimator.GAE

    @property
    def needs_reference(self) -> bool:
        """Whether a KL term reads the reference policy."""
        return self.kl.in_reward or self.kl.in_loss
