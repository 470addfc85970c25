"""From `spec.algorithm` to an estimator and a policy loss; the results of a user's function are checked in each call.

Called by the ranks that compute advantages or train the policy, and before any model is loaded by `try_functions`. What
is checked costs no wait for a device: so that a policy loss is finite is checked when it is tried, and in training by
its gradient (`actor.maxNonFiniteSteps`).
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ppojob_api.v1alpha1.algorithm import AdvantageEstimator, AdvantageFunction, AlgorithmSpec, PolicyLoss
from ppojob_api.v1alpha1.algorithm import PolicyLossFunction as LossBlock
from ppojob_trainer.maths.advantages import ESTIMATORS, AdvantageInputs, Estimator
from ppojob_trainer.maths.policy_losses import POLICY_LOSSES, PolicyLossInputs, TokenLosses
from ppojob_trainer.maths.policy_losses import PolicyLoss as Computed
from ppojob_trainer.user_code import UserCodeError, find_function, import_user_code

_ADVANTAGES, _LOSS = "algorithm.advantageFunction", "algorithm.policyLossFunction"
_OURS = ("pg_loss", "ppo_kl", "entropy", "kl_loss", "kl_coef", "grad_norm", "lr", "non_finite_steps")
"""Metrics of the policy that a user's loss must not replace."""


class AlgorithmFunctionError(RuntimeError):
    """The user's estimator or policy loss cannot be used, or returned something else than it must; names the field."""


def estimator_of(algorithm: AlgorithmSpec) -> Estimator:
    """Return the estimator of a checked spec.

    Raises:
        AlgorithmFunctionError: the user's function cannot be loaded. The estimator raises it for a wrong result.
    """
    block = algorithm.advantage_function
    if algorithm.advantage_estimator is not AdvantageEstimator.FUNCTION:
        return ESTIMATORS[algorithm.advantage_estimator.value]
    assert block is not None, "the spec is checked"
    function = _load(_ADVANTAGES, block)
    compute = functools.partial(_advantages, function, f"{_ADVANTAGES} ({block.name})")
    return Estimator(compute, block.needs_values, block.needs_groups, block.whitens)


def policy_loss_of(algorithm: AlgorithmSpec) -> Computed:
    """Return the policy loss of a checked spec.

    Raises:
        AlgorithmFunctionError: the user's function cannot be loaded. The loss raises it for a wrong result.
    """
    block = algorithm.policy_loss_function
    if algorithm.policy_loss is not PolicyLoss.FUNCTION:
        return POLICY_LOSSES[algorithm.policy_loss.value]
    assert block is not None, "the spec is checked"
    return _UserLoss(_load(_LOSS, block), f"{_LOSS} ({block.name})")


def try_functions(algorithm: AlgorithmSpec) -> None:
    """Call the user's functions with a small batch on the CPU.

    Raises:
        AlgorithmFunctionError: one cannot be loaded, fails, or returns something wrong or not finite.
    """
    estimator = estimator_of(algorithm)
    rewards, log_prob, old_log_prob, values = torch.randn(4, 4, 6, generator=torch.Generator().manual_seed(0)).unbind()
    mask = (torch.arange(6) < torch.tensor([[6], [3], [1], [5]])).long()
    estimator.compute(
        AdvantageInputs(
            rewards=rewards * mask,
            mask=mask,
            values=values * mask if estimator.needs_values else None,
            groups=["a", "a", "b", "b"] if estimator.needs_groups else None,
            gamma=algorithm.gamma,
            lam=algorithm.lam,
        )
    )
    if algorithm.policy_loss is PolicyLoss.FUNCTION:
        _try_policy_loss(policy_loss_of(algorithm), PolicyLossInputs(log_prob, old_log_prob, rewards, mask))


def _load(field: str, block: AdvantageFunction | LossBlock) -> Callable[..., Any]:
    try:
        module = import_user_code(field, block.module, block.path)
        function = find_function(module, block.name, f"{field}.name", str(block.module or block.path))
    except UserCodeError as error:
        raise AlgorithmFunctionError(str(error)) from error.__cause__
    try:
        inspect.signature(function).bind(None, **block.kwargs)
    except TypeError as error:
        wanted = ", ".join(["inputs", *(f"{key}=" for key in block.kwargs)])
        raise AlgorithmFunctionError(
            f"{field}: {block.name} has the signature {inspect.signature(function)} and cannot be called with "
            f"({wanted}): {error}. Correct the function, or {field}.kwargs"
        ) from error
    return functools.partial(function, **block.kwargs)


def _called(function: Callable[..., Any], where: str, inputs: AdvantageInputs | PolicyLossInputs) -> Any:
    try:
        return function(inputs)
    except Exception as error:  # the user's function may raise anything; it becomes a named error
        raise AlgorithmFunctionError(f"{where} failed with {type(error).__name__}: {error}") from error


def _advantages(function: Callable[..., Any], where: str, inputs: AdvantageInputs) -> tuple[Tensor, Tensor]:
    found = _called(function, where, inputs)
    both = found if isinstance(found, tuple) else (found, found)
    if len(both) != 2:
        raise AlgorithmFunctionError(f"{where} returned {len(both)} values: return advantages, or advantages, returns")
    mask = inputs.mask.bool()
    for name, values in zip(("advantages", "returns"), both, strict=True):
        _check_tensor(where, name, values, inputs.rewards)
        wrong = int((~values.isfinite() & mask).sum())
        if wrong:
            raise AlgorithmFunctionError(
                f"{where}: {wrong} of {int(mask.sum())} {name} are not finite. Look for a division by 0 or a logarithm "
                "of 0, such as the deviation of equal rewards"
            )
    advantages, returns = (torch.where(mask, values.detach(), torch.zeros_like(values)) for values in both)
    return advantages, returns


class _UserLoss:
    """Calls the user's policy loss, and remembers the names of its metrics: ranks add them up by name."""

    def __init__(self, function: Callable[..., Any], where: str) -> None:
        self._function = function
        self._where = where
        self._names: list[str] | None = None

    def __call__(self, inputs: PolicyLossInputs) -> TokenLosses:
        found = _called(self._function, self._where, inputs)
        if not isinstance(found, tuple):
            found = (found, {})
        if len(found) != 2 or not isinstance(found[1], Mapping):
            raise AlgorithmFunctionError(
                f"{self._where} returned a tuple of {[type(part).__name__ for part in found]}: return the losses, or "
                "the losses and a dictionary of metrics"
            )
        losses, metrics = found
        _check_tensor(self._where, "the loss", losses, inputs.log_prob)
        if inputs.log_prob.requires_grad and not losses.requires_grad:
            raise AlgorithmFunctionError(
                f"{self._where}: the loss has no gradient. Compute it from inputs.log_prob, without detach, data or "
                "no_grad"
            )
        self._check_metrics(metrics, inputs)
        return losses, {name: values.detach() for name, values in metrics.items()}

    def _check_metrics(self, metrics: Mapping[str, Any], inputs: PolicyLossInputs) -> None:
        for name, values in metrics.items():
            if name in _OURS:
                raise AlgorithmFunctionError(f"{self._where}: actor/{name} is the trainer's own metric: rename yours")
            if not isinstance(values, Tensor) or values.shape != inputs.mask.shape:
                raise AlgorithmFunctionError(
                    f"{self._where}: metric {name!r} is {_described(values)}: return a tensor of shape "
                    f"{list(inputs.mask.shape)}, whose mean over tokens is the metric"
                )
        if self._names is None:
            self._names = list(metrics)
        if list(metrics) != self._names:
            raise AlgorithmFunctionError(
                f"{self._where}: its metrics were {self._names} and are now {list(metrics)}: return the same in every "
                "call, in the same order"
            )


def _try_policy_loss(compute: Computed, inputs: PolicyLossInputs) -> None:
    log_prob = inputs.log_prob.clone().requires_grad_()
    tried = PolicyLossInputs(log_prob, inputs.old_log_prob, inputs.advantages, inputs.mask, inputs.clipping)
    losses, _ = compute(tried)
    kept = losses[tried.mask.bool()]
    (gradient,) = torch.autograd.grad(kept.sum(), log_prob, allow_unused=True)
    for name, values in (("losses", kept), ("gradients", gradient)):
        if values is None or not values.isfinite().all():
            raise AlgorithmFunctionError(
                f"{_LOSS}: its {name} for a small random batch are not all finite. Look for a division by 0, or an "
                "exponential of inputs.log_prob: inputs.log_ratio is bounded"
            )


def _check_tensor(where: str, name: str, values: Any, like: Tensor) -> None:
    fits = isinstance(values, Tensor) and (values.shape, values.dtype) == (like.shape, like.dtype)
    if not fits or values.device != like.device:
        raise AlgorithmFunctionError(
            f"{where}: {name} is {_described(values)}: return a tensor of shape {list(like.shape)}, {like.dtype}, on "
            f"{like.device}"
        )


def _described(values: Any) -> str:
    if not isinstance(values, Tensor):
        return f"of type {type(values).__name__}"
    return f"a tensor of shape {list(values.shape)}, {values.dtype}, on {values.device}"
