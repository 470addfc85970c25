"""A user's own estimator and policy loss: what works, and that each mistake is named with its field and remedy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ppojob_api.v1alpha1.algorithm import AdvantageEstimator, AlgorithmSpec, PolicyLoss
from ppojob_trainer.algorithms import (
    AdvantageInputs,
    AlgorithmFunctionError,
    PolicyLossInputs,
    estimator_of,
    policy_loss_of,
    try_functions,
)
from ppojob_trainer.maths.advantages import ESTIMATORS
from ppojob_trainer.maths.policy_losses import POLICY_LOSSES

EXAMPLE = Path("examples/12-own-algorithm/algorithm.py")


def estimator_spec(path: Path, **fields: Any) -> AlgorithmSpec:
    block = {"path": str(path.absolute()), **fields}
    return AlgorithmSpec.model_validate({"advantageEstimator": "Function", "advantageFunction": block})


def loss_spec(path: Path, **fields: Any) -> AlgorithmSpec:
    block = {"path": str(path.absolute()), **fields}
    return AlgorithmSpec.model_validate({"policyLoss": "Function", "policyLossFunction": block})


def written(folder: Path, body: str, name: str) -> Path:
    """Write a file with the function of that name; `body` is one expression or several lines."""
    path = folder / "own.py"
    lines = body if "\n" in body or body.startswith("raise") else f"return {body}"
    path.write_text(f"import torch\ndef {name}(inputs):\n    {lines}\n")
    return path


def test_each_name_of_the_api_has_its_function() -> None:
    for name in set(AdvantageEstimator) - {AdvantageEstimator.FUNCTION}:
        assert estimator_of(AlgorithmSpec(advantage_estimator=name)) is ESTIMATORS[name.value]
    for loss in set(PolicyLoss) - {PolicyLoss.FUNCTION}:
        assert policy_loss_of(AlgorithmSpec(policy_loss=loss)) is POLICY_LOSSES[loss.value]
    assert len(ESTIMATORS) == len(AdvantageEstimator) - 1
    assert len(POLICY_LOSSES) == len(PolicyLoss) - 1


def test_the_example_compares_with_the_median() -> None:
    spec = estimator_spec(EXAMPLE, needsGroups=True, kwargs={"bound": 2.0})
    rewards = torch.tensor([[1.0, 0.0], [0.0, 5.0], [0.0, 2.0], [7.0, 9.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])

    try_functions(spec)
    estimator = estimator_of(spec)
    advantages, returns = estimator.compute(AdvantageInputs(rewards, mask, groups=["a", "a", "a", "b"]))

    assert (estimator.needs_values, estimator.needs_groups, estimator.whitens) == (False, True, False)
    # The median is 2; 5 - 2 = 3 is bounded.
    assert advantages.tolist() == returns.tolist() == [[-1.0, -1.0], [2.0, 2.0], [0.0, 0.0], [0.0, 0.0]]


def test_the_example_weighs_tokens_by_their_ratio() -> None:
    spec = loss_spec(EXAMPLE, kwargs={"width": 0.5})
    ratio = torch.tensor([[1.0, 1.5]])
    log_prob = ratio.log().requires_grad_()

    try_functions(spec)
    losses, metrics = policy_loss_of(spec)(
        PolicyLossInputs(log_prob, torch.zeros(1, 2), torch.tensor([[1.0, -2.0]]), torch.ones(1, 2))
    )

    weight = torch.tensor([[1.0, torch.tensor(-1.0).exp().item()]])
    torch.testing.assert_close(losses, -weight * ratio * torch.tensor([[1.0, -2.0]]))
    torch.testing.assert_close(metrics["fade_weight"], weight)
    assert losses.requires_grad


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("inputs.rewards[:, :1]", r"advantages is a tensor of shape \[4, 1\].*return a tensor of shape \[4, 6\]"),
        ("inputs.rewards.double()", r"advantages is a tensor of .*float64.*return .*float32"),
        ("(inputs.rewards, 1.0)", "returns is of type float"),
        ("(inputs.rewards,) * 3", "returned 3 values"),
        ("inputs.rewards / 0", r"\d+ of 15 advantages are not finite. Look for a division by 0"),
        ("(inputs.rewards, inputs.rewards * torch.nan)", "15 of 15 returns are not finite"),
        ("None", "advantages is of type NoneType"),
        ("inputs.values + 1", "failed with TypeError"),
        ("raise ValueError('no median')", r" \(compute_advantages\) failed with ValueError: no median"),
    ],
)
def test_a_wrong_estimator_is_refused_when_it_is_tried(tmp_path: Path, body: str, message: str) -> None:
    path = written(tmp_path, body, "compute_advantages")

    with pytest.raises(AlgorithmFunctionError, match=rf"^algorithm.advantageFunction.*{message}"):
        try_functions(estimator_spec(path))


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("inputs.log_prob.mean()", r"the loss is a tensor of shape \[\].*return a tensor of shape \[4, 6\]"),
        ("inputs.log_prob.double()", "float64"),
        ("-inputs.advantages", "the loss has no gradient"),
        ("inputs.log_prob, 3", "tuple of .*Tensor.*int"),
        ("inputs.log_prob, {'pg_loss': inputs.log_prob}", "actor/pg_loss is the trainer's own metric"),
        ("inputs.log_prob, {'mine': inputs.log_prob.mean()}", r"metric 'mine' is a tensor of shape \[\]"),
        ("inputs.log_prob / 0", "its losses for a small random batch are not all finite"),
        ("(inputs.log_prob - inputs.log_prob.detach()).sqrt()", "its gradients for a small random batch"),
    ],
)
def test_a_wrong_policy_loss_is_refused_when_it_is_tried(tmp_path: Path, body: str, message: str) -> None:
    path = written(tmp_path, body, "compute_policy_loss")

    with pytest.raises(AlgorithmFunctionError, match=rf"^algorithm.policyLossFunction.*{message}"):
        try_functions(loss_spec(path))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"path": "/nowhere/own.py"}, "algorithm.policyLossFunction.path '/nowhere/own.py': there is no such file"),
        ({"name": "loss"}, "set algorithm.policyLossFunction.name to one of compute_advantages, compute_policy_loss"),
        ({"kwargs": {"epsilon": 1}}, r"cannot be called with \(inputs, epsilon=\).*policyLossFunction.kwargs"),
    ],
)
def test_a_function_that_cannot_be_called_is_refused(fields: dict[str, Any], message: str) -> None:
    spec = AlgorithmSpec.model_validate(
        {"policyLoss": "Function", "policyLossFunction": {"path": str(EXAMPLE.absolute()), **fields}}
    )

    with pytest.raises(AlgorithmFunctionError, match=message):
        policy_loss_of(spec)


def test_metrics_must_have_the_same_names_in_every_call(tmp_path: Path) -> None:
    body = "name = 'many' if len(inputs.mask) > 2 else 'few'\n    return inputs.log_prob, {name: inputs.log_prob}"
    compute = policy_loss_of(loss_spec(written(tmp_path, body, "compute_policy_loss")))
    rows = torch.zeros(4, 2, requires_grad=True)
    compute(PolicyLossInputs(rows, rows.detach(), rows.detach(), torch.ones(4, 2)))

    with pytest.raises(AlgorithmFunctionError, match=r"metrics were \['many'\] and are now \['few'\]"):
        compute(PolicyLossInputs(rows[:2], rows[:2].detach(), rows[:2].detach(), torch.ones(2, 2)))
