"""The exchange of tokens between ranks that divide experts: one rank's numbers, and what each message has.

The ranks are threads, whose messages are differentiable slices, so one backward pass goes through all of them.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ppojob_trainer.engines.train import expert
from ppojob_trainer.engines.train.expert import ExpertPeers
from ppojob_trainer.engines.train.fsdp import experts
from tests.unit.trainer.engines.tiny_experts import MIXTURES, NUM_EXPERTS, tiny_experts

HIDDEN = 48
SECONDS = 60


class Messages:
    """What ranks in threads send each other.

    tokens: the numbers of rows that each rank has sent with hidden states. dtypes: of all that the first rank has sent.
    """

    def __init__(self, num_ranks: int) -> None:
        self.barrier = threading.Barrier(num_ranks, timeout=SECONDS)
        self.sent: list[tuple[Tensor, ...]] = [()] * num_ranks
        self.tokens: list[list[int]] = [[] for _ in range(num_ranks)]
        self.dtypes: list[torch.dtype] = []

    def exchange(self, rank: int, parts: tuple[Tensor, ...]) -> Tensor:
        self.sent[rank] = parts
        if rank == 0:
            self.dtypes.append(parts[0].dtype)
        if parts[0].shape[1:] == (HIDDEN,):
            self.tokens[rank].append(sum(map(len, parts)))
        self.barrier.wait()
        received = torch.cat([of_rank[rank] for of_rank in self.sent])
        self.barrier.wait()
        return received


class InThreads(ExpertPeers):
    """A rank's place in a group of threads."""

    @classmethod
    def make(cls, messages: Messages, rank: int) -> InThreads:
        mesh: Any = SimpleNamespace(size=lambda: len(messages.sent), get_local_rank=lambda: rank)
        made = cls(mesh, mesh)
        object.__setattr__(made, "messages", messages)
        return made

    def _exchange(self, rows: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        messages: Messages = self.messages  # type: ignore[attr-defined]
        parts = rows.chunk(self.size) if sent is None else rows.split(sent)
        found = messages.exchange(self.rank, parts)
        assert received is None or len(found) == sum(received)
        return found


def whole_experts(family: str, dtype: torch.dtype) -> nn.Module:
    model = tiny_experts(dtype, family)
    experts.add_counts(model)
    _, found = next(experts.expert_modules(model))
    found.config._experts_implementation = experts.IMPLEMENTATION  # type: ignore[union-attr]
    return found.train()


def own_experts(whole: nn.Module, peers: InThreads) -> nn.Module:
    """A rank's part, whose parameters are new leaves."""
    own = copy.deepcopy(whole)
    for name, parameter in whole.named_parameters():
        part = parameter.detach().chunk(peers.size)[peers.rank].clone()
        setattr(own, name, nn.Parameter(part))
    setattr(own, experts._PEERS, peers)
    return own


def even(tokens: int, generator: torch.Generator) -> Tensor:
    return torch.rand(tokens, NUM_EXPERTS, generator=generator)


def of_the_first_rank(tokens: int, generator: torch.Generator) -> Tensor:
    """The other ranks receive nothing."""
    scores = even(tokens, generator)
    scores[:, 2:] -= 2
    return scores


def of_the_last_rank(tokens: int, generator: torch.Generator) -> Tensor:
    scores = even(tokens, generator)
    scores[:, :-2] -= 2
    return scores


@pytest.fixture(params=MIXTURES)
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("per_token", [1, 2, 5])
@pytest.mark.parametrize(
    ("tokens", "scores"),
    [
        ([7, 5], even),
        ([7, 0], even),
        ([0, 0], even),
        ([4, 6, 5], even),
        ([3, 0, 4, 1, 5, 2], even),
        ([5, 7, 6], of_the_first_rank),
        ([5, 0, 6], of_the_last_rank),
    ],
)
def test_values_and_gradients_are_those_of_one_rank(
    tokens: list[int], scores: Callable[[int, torch.Generator], Tensor], per_token: int
) -> None:
    compare(whole_experts("qwen3_moe", torch.float32), tokens, scores, per_token)


def test_they_are_for_every_family(family: str) -> None:
    compare(whole_experts(family, torch.float32), [7, 5], even, 2)


def compare(
    whole: nn.Module, tokens: list[int], scores: Callable[[int, torch.Generator], Tensor], per_token: int
) -> None:
    generator = torch.Generator().manual_seed(3)
    messages = Messages(len(tokens))
    peers = [InThreads.make(messages, rank) for rank in range(len(tokens))]
    parts = [own_experts(whole, each) for each in peers]
    hidden = torch.randn(sum(tokens), HIDDEN, generator=generator, requires_grad=True)
    weights, chosen = scores(sum(tokens), generator).topk(per_token)
    weights.requires_grad_()
    outer = torch.randn(sum(tokens), HIDDEN, generator=generator)
    expected = whole(hidden, chosen, weights)
    gradients = torch.autograd.grad(expected, [hidden, weights, *whole.parameters()], outer)
    given = zip(parts, *(one.split(tokens) for one in (hidden, chosen, weights)), strict=True)

    with ThreadPoolExecutor(len(tokens)) as threads:
        found = torch.cat([job.result(SECONDS) for job in [threads.submit(one[0], *one[1:]) for one in given]])
    of_ranks = torch.autograd.grad(
        found, [hidden, weights, *(one for part in parts for one in part.parameters())], outer
    )

    num_parameters = len(list(whole.parameters()))
    of_parameters = [torch.cat(of_ranks[2 + number :: num_parameters]) for number in range(num_parameters)]
    all_found, all_expected = [found.detach(), *of_ranks[:2], *of_parameters], [expected.detach(), *gradients]
    for ours, theirs in zip(all_found, all_expected, strict=True):
        # Float32 sums in another order: first those of a rank, then over the ranks.
        tolerance = 1e-5 * float(theirs.abs().max()) if theirs.numel() else 0.0
        torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    num_own = NUM_EXPERTS // len(tokens)
    ranks_of_tokens = [len({choice // num_own for choice in row}) for row in chosen.tolist()]
    for rank, of_rank in enumerate(torch.tensor(ranks_of_tokens).split(tokens)):
        assert messages.tokens[rank][0] == of_rank.sum(), "a token goes once to each rank with experts of it"
    assert sum(one[0] for one in messages.tokens) == sum(one[1] for one in messages.tokens), "a sum for each token"
    counts = sum(part.get_buffer(experts.COUNTS) for part in parts)
    assert counts.tolist() == chosen.flatten().bincount(minlength=NUM_EXPERTS).tolist()


def test_the_second_computation_of_a_layer_exchanges_no_numbers_of_tokens_and_no_choices() -> None:
    generator = torch.Generator().manual_seed(3)
    messages = Messages(2)
    whole, peers = whole_experts("qwen3_moe", torch.float32), [InThreads.make(messages, rank) for rank in range(2)]
    parts = [own_experts(whole, each) for each in peers]
    hidden = torch.randn(2, 6, HIDDEN, generator=generator)
    weights, chosen = torch.rand(2, 6, NUM_EXPERTS, generator=generator).topk(2)
    plans: list[list[Any]] = [[], []]

    def compute(rank: int) -> Tensor:
        with experts.plan_once(parts[rank], plans[rank]):
            found: Tensor = parts[rank](hidden[rank], chosen[rank], weights[rank])
        return found

    def compute_on_both() -> tuple[list[Tensor], list[torch.dtype]]:
        messages.dtypes.clear()
        with ThreadPoolExecutor(2) as threads:
            return list(threads.map(compute, range(2))), list(messages.dtypes)

    first, sent = compute_on_both()
    second, sent_again = compute_on_both()

    assert sent == [torch.int64, torch.int32, *[torch.float32] * 3]
    assert sent_again == [torch.float32] * 3, "weights, hidden states, and the sums that come back"
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one, other)
    counts = sum(part.get_buffer(experts.COUNTS) for part in parts)
    assert counts.sum() == chosen.numel(), "each choice is counted once"
    assert getattr(parts[0], experts._PLANS) is None
    for plan in (one[0] for one in plans):
        assert plan.sent is not None
        for rows in (plan.own, plan.sent):
            for kept in (rows.choices, rows.tokens, rows.of_tokens):
                assert kept.untyped_storage().nbytes() == 8 * len(kept), "no view of all choices is kept"


def test_a_route_says_what_is_sent_and_the_rows_of_own_experts() -> None:
    """Rank 0 sends two tokens to rank 0 and one to rank 1; rank 1 sends one to rank 0."""
    messages = Messages(2)
    peers = [InThreads.make(messages, rank) for rank in range(2)]
    with ThreadPoolExecutor(2) as threads:
        jobs = [
            threads.submit(peers[0].route, torch.tensor([2, 1]), torch.tensor([1, 2, 1, 0]), 2, 2),
            threads.submit(peers[1].route, torch.tensor([1, 0]), torch.tensor([1, 1, 0, 0]), 1, 2),
        ]
        first, second = (job.result(SECONDS) for job in jobs)
    assert (first.sent, first.received, first.num_rows, first.counts_e.tolist()) == ([2, 1], [2, 1], 5, [2, 3])
    assert (second.sent, second.received, second.num_rows, second.counts_e.tolist()) == ([1, 0], [1, 0], 1, [1, 0])


def test_sizes_that_cannot_be_are_found() -> None:
    numbers = torch.tensor([[3, 0], [1, 1], [1, 1]])
    assert expert._read(numbers, 3, 2) == numbers.tolist()
    with pytest.raises(AssertionError, match="once to each"):
        expert._read(numbers, 2, 2)
