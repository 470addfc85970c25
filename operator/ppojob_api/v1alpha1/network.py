"""`spec.pools[].network`: how the processes of a pool reach others on other hosts.

`pools.py` has it for each pool. The operator's manifests and the trainer's start of processes read it.
"""

from typing import Annotated

from pydantic import Field

from ppojob_api.v1alpha1.base import ApiModel
from ppojob_api.v1alpha1.quantities import StringMap
from ppojob_api.v1alpha1.spelling import spelled


class RDMA(ApiModel):
    """Devices for remote memory access (InfiniBand, RoCE, EFA) that a device plugin hands out."""

    resource_name: Annotated[
        str,
        spelled(
            r"^[-.a-z0-9]+/[-._a-zA-Z0-9]+$",
            "must be the device plugin's name of the resource, such as rdma/hca",
            max_length=253,
        ),
    ]
    """Resource that the pods request, under the device plugin's name: `rdma/hca`, `vpc.amazonaws.com/efa`."""
    count: int = Field(default=1, ge=1, le=64)
    """Devices per pod, not per GPU."""


class PoolNetwork(ApiModel):
    """The network of a pool's pods."""

    host_network: bool = False
    """Use the host's network."""
    rdma: RDMA | None = None
    """RDMA devices of each pod; the pod also gets the capability IPC_LOCK. Absent: none."""
    interface: (
        Annotated[
            str,
            spelled(r"^[a-zA-Z0-9][-._a-zA-Z0-9]*$", "must be the name of one interface, such as eth0", max_length=15),
        ]
        | None
    ) = None
    """Network interface of NCCL's sockets and gloo, such as `eth0`. Absent: NCCL and gloo choose."""
    nccl: StringMap = Field(default_factory=dict)
    """Variables for NCCL, UCX and gloo (`NCCL_...`, `UCX_...`, `GLOO_...`) of the pool's processes."""

    def environment(self) -> dict[str, str]:
        """Return the variables of the pool's processes."""
        if self.interface is None:
            return dict(self.nccl)
        # NCCL takes a name as a beginning, so that eth1 would be eth10 too; with = it takes the whole name.
        return {"NCCL_SOCKET_IFNAME": f"={self.interface}", "GLOO_SOCKET_IFNAME": self.interface, **self.nccl}
