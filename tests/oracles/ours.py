"""Our functions, called with the names of the random cases; and the comparison, to 1e-5."""

from __future__ import annotations

import torch
from torch import Tensor

from ppojob_trainer.maths.advantages import ESTIMATORS, AdvantageInputs
from ppojob_trainer.maths.kl import make_kl_controller
from ppojob_trainer.maths.log_probs import linear_log_probs
from ppojob_trainer.maths.losses import Denominators, policy_loss, value_loss
from ppojob_trainer.maths.masked import masked_whiten
from ppojob_trainer.maths.policy_losses import POLICY_LOSSES, Clipping, PolicyLossInputs
from tests.oracles.random_cases import KL_HISTORY, SETTINGS, VOCABULARY

Case = dict[str, Tensor]
TOLERANCE = 1e-5


def assert_equal(ours: Tensor, theirs: Tensor, mask: Tensor | None = None) -> None:
    """Compare; with a mask only where it is not 0, because what peers leave on padding means nothing."""
    if mask is not None:
        ours, theirs = ours[mask.bool()], theirs[mask.bool()]
    torch.testing.assert_close(ours.detach().float(), theirs.float(), atol=TOLERANCE, rtol=TOLERANCE)


def advantages(case: Case, name: str, gamma: float = 1.0, lam: float = 1.0) -> tuple[Tensor, Tensor]:
    """As the worker groups do: the estimator, then whitening where it asks for it."""
    groups = case["groups"].tolist()
    row = ESTIMATORS[name]
    inputs = AdvantageInputs(case["rewards"], case["mask"], case["values"], groups, gamma, lam)
    found, returns = row.compute(inputs)
    return (masked_whiten(found, case["mask"]) if row.whitens else found), returns


def policy(
    case: Case, clipping: Clipping, aggregation: str, rows: slice | None = None, name: str = "PPO"
) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The share of `rows` of the policy loss, its metrics, and the gradient by log_prob."""
    part = {key: case[key][rows or slice(None)] for key in ("log_prob", "old_log_prob", "advantages", "mask")}
    log_prob = part["log_prob"].clone().requires_grad_()
    inputs = PolicyLossInputs(log_prob, part["old_log_prob"], part["advantages"], part["mask"], clipping)
    loss, metrics = policy_loss(inputs, Denominators.of(case["mask"]), POLICY_LOSSES[name], aggregation)
    return loss, metrics, torch.autograd.grad(loss, log_prob)[0]


def value(case: Case, aggregation: str) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """The value loss, its metrics, and the gradient by the new values."""
    values = case["new_values"].clone().requires_grad_()
    loss, metrics = value_loss(
        values,
        case["values"],
        case["returns"],
        case["mask"],
        Denominators.of(case["mask"]),
        SETTINGS["clip_value"],
        aggregation,
    )
    return loss, metrics, torch.autograd.grad(loss, values)[0]


def words(case: Case, which: int) -> tuple[Tensor, Tensor]:
    """Log-probs (0) or entropies (1) [B, R] from hidden states in chunks, and their gradient by the hidden states."""
    hidden = case["hidden"].flatten(0, 1).clone().requires_grad_()
    found = linear_log_probs(hidden, case["output_layer"], case["labels"].flatten(), chunk_size=VOCABULARY)[which]
    (gradient,) = torch.autograd.grad(found.sum(), hidden)
    return found.view(case["mask"].shape), gradient.view(case["hidden"].shape)


def kl_coefficients() -> Tensor:
    """The adaptive controller's coefficient after each batch of the history."""
    controller = make_kl_controller(
        "Adaptive", SETTINGS["kl_coefficient"], SETTINGS["kl_target"], int(SETTINGS["kl_horizon"])
    )
    found = []
    for current, number in KL_HISTORY:
        controller.update(current, int(number))
        found.append(controller.coefficient)
    return torch.tensor(found, dtype=torch.float64)
