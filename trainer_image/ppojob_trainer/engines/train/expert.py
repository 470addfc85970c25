"""Expert parallelism: each rank of a group owns some experts of every layer, and computes them for the whole group.

    every layer with experts:  its tokens, all experts  ─ dispatch ─▶  tokens of all ranks, its own experts
                                                                       its experts
                               its tokens, all experts  ◀─ combine ──  a sum for each of the tokens

Lepikhin et al. 2020, arXiv 2006.16668, section 3; a token is sent once to each rank, as in DeepSeek-V3
(arXiv 2412.19437, section 3.2.2). The ranks of a group have different tokens: otherwise they are data-, sequence- or
tensor-parallel ranks. This is a rank's place in its group, and the exchange of tokens. `fsdp.experts` chooses the
tokens, and `train.mesh` creates the groups. No token is dropped: a rank may receive no tokens, or those of all ranks.

Suffixes: N tokens that are sent or received, once for each rank; E experts of a layer, e those of a rank; R ranks.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ExpertPeers", "Route"]


@dataclass(frozen=True)
class Route:
    """How many tokens a rank sends to each rank of its group and receives from it.

    num_rows: of this rank's experts, one for each received token and each of its experts here. counts_e: those of each
    expert, int64 [e].
    """

    sent: list[int]
    received: list[int]
    num_rows: int
    counts_e: Tensor


@dataclass(frozen=True)
class ExpertPeers:
    """This rank's expert-parallel group. mesh: its ranks, over which the experts of a layer are divided.

    fsdp_mesh: the ranks with the same experts, over which FSDP shards them and sums their gradients; two axes if there
    are copies of the model. With tensor parallelism a group may have one rank, because FSDP shards experts over the
    tensor-parallel ranks too.
    """

    mesh: DeviceMesh
    fsdp_mesh: DeviceMesh

    @classmethod
    def of(cls, groups: Mapping[str, dist.ProcessGroup], device_type: str, ranks: Tensor) -> ExpertPeers:
        """Create both meshes from this rank's group of each axis, the innermost last: that is the expert axis.

        Args:
            ranks: of this pipeline stage, int64 [ranks]; without a pipeline all.
        """
        axes = tuple(groups)
        placed = ranks.view([group.size() for group in groups.values()])
        whole = DeviceMesh.from_group(list(groups.values()), device_type, placed, mesh_dim_names=axes)
        return cls(whole[axes[-1]], whole[axes[:-1]])

    @property
    def groups(self) -> list[dist.ProcessGroup]:
        """The groups that communicate if experts are divided.

        Without, they are left out, because a dense model uses none of them. A mixture with tensor parallelism alone
        uses `fsdp_mesh` all the same, and opens its connections in the first pass.
        """
        if self.size == 1:
            return []
        found = [*self.mesh.get_all_groups(), *self.fsdp_mesh.get_all_groups()]
        return [group for group in found if group.size() > 1]

    @property
    def size(self) -> int:
        """Number of ranks over which the experts are divided."""
        return self.mesh.size()

    @property
    def rank(self) -> int:
        """This rank's place in its group: with e experts each, its first one is `rank * e`."""
        return self.mesh.get_local_rank()

    def route(self, tokens_R: Tensor, counts_E: Tensor, num_tokens: int, per_token: int) -> Route:
        """Exchange the numbers of tokens that the ranks send each other; the host waits for them. Collective.

        Args:
            tokens_R: how many of this rank's tokens have experts of each rank, int64 [R].
            counts_E: this rank's choices of each expert, int64 [E]; the first rank of the group owns the first E / R.
            num_tokens: of this rank, with `per_token` choices each.
        """
        sizes = torch.cat([tokens_R.unsqueeze(1), counts_E.view(self.size, -1)], dim=1)
        of_others = self._exchange(sizes).view_as(sizes)
        numbers = torch.stack([tokens_R, of_others[:, 0], of_others[:, 1:].sum(dim=1)])
        sent, received, rows = _read(numbers, num_tokens, per_token)
        return Route(sent, received, sum(rows), of_others[:, 1:].sum(dim=0))

    def dispatch(self, tokens_N: Tensor, route: Route) -> Tensor:
        """Send tokens, which are ordered by rank, [N, anything]; return those for this rank. Differentiable."""
        return self._exchange(tokens_N, route.received, route.sent)

    def combine(self, results_N: Tensor, route: Route) -> Tensor:
        """Send results back; return those of the tokens of `dispatch`, in their order. Differentiable."""
        return self._exchange(results_N, route.sent, route.received)

    def _exchange(self, rows: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        exchanged: Tensor = _AllToAll.apply(rows, received, sent, self.mesh.get_group())  # type: ignore[no-untyped-call]
        return exchanged


class _AllToAll(torch.autograd.Function):
    """Rows for each rank of a group, exchanged for those of all ranks; gradients go back.

    torch's differentiable functional collectives do the same, with 0.4 ms of the processor for each message and
    direction (a profile on H200s), in which the GPU waits.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
    ) -> Tensor:
        ctx.back = (sent, received, group)
        return _all_to_all(rows, received, sent, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return _all_to_all(gradients[0], *ctx.back), None, None, None


def _all_to_all(rows: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup) -> Tensor:
    """Return what the ranks send to this one; None as sizes: each rank sends equally much to each."""
    found = rows.new_empty((len(rows) if received is None else sum(received), *rows.shape[1:]))
    dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
    return found


def _read(numbers: Tensor, num_tokens: int, per_token: int) -> list[list[int]]:
    """Return the tokens that this rank sends to each rank, those that it receives, and their rows of its experts.

    The one place where the host waits for the device in a layer: it must know the sizes of the messages. Fake tensors
    have no numbers, so `planning` replaces this function.

    Args:
        numbers: int64 [3, R].
        num_tokens: of this rank, with `per_token` choices each.
    """
    sent, received, rows = numbers.tolist()
    assert max(sent) <= num_tokens <= sum(sent) <= num_tokens * per_token, "a token goes once to each of its ranks"
    return [sent, received, rows]
