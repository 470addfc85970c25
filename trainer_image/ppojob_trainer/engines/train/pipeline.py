"""Pipeline parallelism: each rank of a group has one or several stages, which are consecutive layers of the model.

    stage 0          embedding, first layers    ─ hidden states ─▶  ◀─ their gradients ─
    ...              layers                     ─ hidden states ─▶  ◀─ their gradients ─
    the last stage   last layers, final norm, output layer or value head; loss

Huang et al. 2019, arXiv 1811.06965, section 2. With several stages, a rank has every `size`-th one (virtual stages,
Narayanan et al. 2021, arXiv 2104.04473, section 2.2): of two ranks with two stages each, rank 0 has stages 0 and 2, and
rank 1 has 1 and 3. This is a rank's place in its group and the small messages of the group beside those of the schedule
(`fsdp.passes`), which sends the hidden states. `train.mesh` creates the groups; `fsdp.stages` divides a model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class PipelinePeers:
    """This rank in its pipeline, whose ranks have `virtual` stages each and work on the same sequences."""

    group: dist.ProcessGroup
    rank: int
    size: int
    virtual: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this rank has the first stage, and so the embedding."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage: the output layer or the value head, and the loss."""
        return self.rank == self.size - 1

    @property
    def num_stages(self) -> int:
        """Stages of all ranks."""
        return self.size * self.virtual

    @property
    def stages(self) -> range:
        """The numbers of this rank's stages."""
        return range(self.rank, self.num_stages, self.size)

    def sum(self, values: Tensor) -> Tensor:
        """Return the sum over the ranks, on the tensor's device. Collective."""
        summed = values.clone()
        dist.all_reduce(summed, group=self.group)
        return summed

    def broadcast(self, values: Tensor, rank: int) -> None:
        """Fill a contiguous tensor with that of a rank, on the tensor's device. Collective."""
        # As bytes, because gloo does not know all dtypes.
        dist.broadcast(values.view(torch.uint8), group=self.group, group_src=rank)

    def of_last(self, value: Any) -> Any:
        """Return the last rank's value, a small object of plain numbers. Collective; it does not use the device."""
        found = [value]
        dist.broadcast_object_list(found, group=self.group, group_src=self.size - 1, device=torch.device("cpu"))
        return found[0]

    def of_other_end(self, values: Tensor) -> Tensor:
        """Return what the last rank has, on the first one, and the reverse. Only these two call it."""
        other = 0 if self.is_last else self.size - 1
        received = torch.empty_like(values)
        operations = [
            dist.P2POp(dist.isend, values, group=self.group, group_peer=other),
            dist.P2POp(dist.irecv, received, group=self.group, group_peer=other),
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()
        return received
