"""Expert parallelism: each rank of a group owns some experts of every layer, and computes them for the whole group.

    every layer with experts:  its tokens, all experts  ─ dispatch ─▶  tokens of all ranks, its own experts
                                                                       its experts
                               its tokens, all experts  ◀─ combine ──

Lepikhin et al. 2020, arXiv 2006.16668, section 3. The ranks of a group have different tokens: otherwise they
are data-, sequence- or tensor-parallel ranks. This is a rank's place in its group, and the exchange of rows.
`fsdp.experts` chooses the rows, and `train.mesh` creates the groups. No token is dropped: a rank may receive no rows,
or those of all ranks.

Suffixes: S rows, one for each token and each of its experts; D size of the hidden states; E experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, wait_tensor
from torch.distributed.device_mesh import DeviceMesh

__all__ = ["ExpertPeers", "Route"]


@dataclass(frozen=True)
class Route:
    """How many rows a rank sends to each rank of its group and receives from it.

    experts: for each received row, the number of its expert among those of this rank, int64 [rows].
    """

    sent: list[int]
    received: list[int]
    experts: Tensor


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

    def route(self, counts_E: Tensor, num_rows: int) -> Route:
        """Exchange the numbers of rows that the ranks send each other; the host waits for them. Collective.

        Args:
            counts_E: this rank's rows for each expert, int64 [E]; the first rank of the group owns the first E / size.
            num_rows: their sum.
        """
        counts = counts_E.view(self.size, -1)
        received = self._exchange(counts).view_as(counts)
        sent_rows, received_rows = _read(torch.stack([counts.sum(1), received.sum(1)]), num_rows)
        own = torch.arange(counts.shape[1], device=counts.device).repeat(self.size)
        experts = own.repeat_interleave(received.flatten(), output_size=sum(received_rows))
        return Route(sent_rows, received_rows, experts)

    def dispatch(self, rows_SD: Tensor, route: Route) -> Tensor:
        """Send rows, which are ordered by their expert, to its owner; return those for this rank. Differentiable."""
        return self._exchange(rows_SD, route.received, route.sent)

    def combine(self, rows_SD: Tensor, route: Route) -> Tensor:
        """Send rows back; return those that `dispatch` has sent, in their order. Differentiable."""
        return self._exchange(rows_SD, route.sent, route.received)

    def _exchange(self, rows: Tensor, received: list[int] | None = None, sent: list[int] | None = None) -> Tensor:
        exchanged = all_to_all_single(rows.contiguous(), received, sent, self.mesh.get_group())
        waited: Tensor = wait_tensor(exchanged)  # type: ignore[no-untyped-call]
        return waited


def _read(sizes: Tensor, num_rows: int) -> list[list[int]]:
    """Return the rows that this rank sends to each rank, `num_rows` together, and those that it receives.

    The one place where the host waits for the device in a pass: it must know the sizes of the messages. Fake tensors
    have no numbers, so `planning` replaces this function.
    """
    sent, received = sizes.tolist()
    assert sum(sent) == num_rows, "each row has one expert, and each expert one owner"
    return [sent, received]
