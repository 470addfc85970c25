"""A user-defined estimator and policy loss: advantages by the group's median, and a loss that fades out."""

import torch


def compute_advantages(inputs, bound=3.0):
    """Compare a response with its group's median, so that one lucky response does not punish all others."""
    total = (inputs.rewards * inputs.mask).sum(dim=1)
    advantage = torch.zeros_like(total)
    for group in set(inputs.groups):
        rows = [row for row, name in enumerate(inputs.groups) if name == group and inputs.mask[row].any()]
        if rows:
            advantage[rows] = total[rows] - total[rows].median()
    return advantage.clamp(-bound, bound).unsqueeze(1) * inputs.mask


def compute_policy_loss(inputs, width=0.2):
    """Weigh a token less, the further its ratio is from 1, where PPO cuts it off at once."""
    ratio = inputs.log_ratio.exp()
    weight = torch.exp(-(((ratio.detach() - 1) / width) ** 2))
    return -weight * ratio * inputs.advantages, {"fade_weight": weight}
