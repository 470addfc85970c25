"""The chunked log-probs against the formula on logits in memory, forward and backward."""

import pytest
import torch

from ppojob_trainer.maths.log_probs import CHUNK_NUMBERS, chunk_tokens, linear_log_probs, plain_log_probs

T, D, V = 11, 5, 17


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    hidden = torch.randn(T, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), generator=generator)


def gradients(outputs, tensors, log_prob_share: float, entropy_share: float):
    log_probs, entropy = outputs
    weights = torch.linspace(-1, 2, T, dtype=log_probs.dtype)
    loss = (weights * (log_prob_share * log_probs + entropy_share * entropy)).sum()
    return torch.autograd.grad(loss, tensors)


@pytest.mark.parametrize("chunk_size", [1, 4, 11, 100, None])
@pytest.mark.parametrize("temperature", [1.0, 0.7, 2.0])
def test_values_and_gradients_are_those_of_the_formula(chunk_size, temperature) -> None:
    hidden, weight, labels = inputs()
    chunked = linear_log_probs(hidden, weight, labels, temperature, chunk_size)
    plain = plain_log_probs(hidden @ weight.t(), labels, temperature)
    for ours, theirs in zip(chunked, plain, strict=True):
        assert torch.allclose(ours, theirs)
    expected = gradients(plain, (hidden, weight), 1.0, 0.3)
    for ours, theirs in zip(gradients(chunked, (hidden, weight), 1.0, 0.3), expected, strict=True):
        assert torch.allclose(ours, theirs)


def test_gradcheck() -> None:
    hidden, weight, labels = inputs()
    assert torch.autograd.gradcheck(lambda h, w: linear_log_probs(h, w, labels, 0.8, 3), (hidden, weight))


@pytest.mark.parametrize("output", [0, 1])
def test_gradients_of_one_output_alone(output: int) -> None:
    hidden, weight, labels = inputs()
    expected = torch.autograd.grad(plain_log_probs(hidden @ weight.t(), labels)[output].sum(), (hidden, weight))
    actual = torch.autograd.grad(linear_log_probs(hidden, weight, labels, chunk_size=4)[output].sum(), (hidden, weight))
    for ours, theirs in zip(actual, expected, strict=True):
        assert torch.allclose(ours, theirs)


@pytest.mark.parametrize("frozen", [0, 1])
def test_a_frozen_input_gets_no_gradient(frozen: int) -> None:
    hidden, weight, labels = inputs()
    (hidden, weight)[frozen].requires_grad_(False)
    linear_log_probs(hidden, weight, labels)[0].sum().backward()
    assert ((hidden, weight)[frozen].grad, (hidden, weight)[1 - frozen].grad is None) == (None, False)


def test_uniform_distribution_by_hand() -> None:
    log_probs, entropy = linear_log_probs(torch.zeros(2, D), torch.randn(V, D), torch.tensor([0, 3]))
    expected = torch.full((2,), float(V)).log()
    assert torch.allclose(-log_probs, expected)
    assert torch.allclose(entropy, expected)


def test_bfloat16_gives_float32_and_close_gradients() -> None:
    hidden, weight, labels = inputs(torch.bfloat16)
    chunked = linear_log_probs(hidden, weight, labels, chunk_size=4)
    plain = plain_log_probs(hidden @ weight.t(), labels)
    assert {output.dtype for output in chunked} == {torch.float32}
    assert torch.allclose(chunked[0], plain[0], atol=1e-6)
    actual, expected = (gradients(outputs, (hidden, weight), 1.0, 0.1) for outputs in (chunked, plain))
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.dtype == torch.bfloat16
        assert torch.nn.functional.cosine_similarity(ours.flatten().float(), theirs.flatten().float(), dim=0) > 0.999


def test_autocast_outside_changes_nothing() -> None:
    hidden, weight, labels = inputs(torch.float32)
    expected = linear_log_probs(hidden, weight, labels)[0]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual = linear_log_probs(hidden, weight, labels)[0]
    assert torch.equal(actual, expected)


def test_extreme_logits_stay_finite() -> None:
    hidden = torch.tensor([[1e4], [-1e4]], requires_grad=True)
    log_probs, entropy = linear_log_probs(hidden, torch.tensor([[1.0], [-1.0], [0.0]]), torch.tensor([0, 0]))
    (log_probs + entropy).sum().backward()
    assert log_probs.tolist() == [0.0, -2e4]
    assert entropy.tolist() == [0.0, 0.0]
    assert hidden.grad.isfinite().all()


def test_no_tokens() -> None:
    hidden, weight, _ = inputs()
    log_probs, entropy = linear_log_probs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64))
    (log_probs.sum() + entropy.sum()).backward()
    assert weight.grad.abs().sum() == 0


def test_a_chunk_keeps_to_its_budget() -> None:
    assert chunk_tokens(152_000) * 152_000 <= CHUNK_NUMBERS
    assert chunk_tokens(10**12) == 1


@pytest.mark.parametrize(
    ("hidden", "weight", "labels", "temperature", "message"),
    [
        (torch.zeros(2, 3), torch.zeros(4, 5), torch.zeros(2), 1.0, r"got \[2, 3\] and \[4, 5\]"),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(3), 1.0, r"labels must be \[2\]"),
        (torch.zeros(2, 3), torch.zeros(4, 3), torch.zeros(2), 0.0, "temperature must be above 0"),
    ],
)
def test_what_does_not_fit_is_refused(hidden, weight, labels, temperature, message) -> None:
    with pytest.raises(ValueError, match=message):
        linear_log_probs(hidden, weight, labels.long(), temperature)
