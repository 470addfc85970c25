"""Rules of `spec.pools[].network`: which variables it may set, and none twice.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.spec import PPOJobSpec

PREFIXES = ("NCCL_", "UCX_", "GLOO_")
"""Beginnings of the variables that `nccl` may set."""

INTERFACE_VARIABLES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
"""What `interface` sets."""

NETWORK_RULES = [
    Rule(
        rule=(
            "!has(self.nccl) || self.nccl.all(name, "
            + " || ".join(f"name.startsWith('{prefix}')" for prefix in PREFIXES)
            + ")"
        ),
        message=f"nccl sets only variables that begin with {', '.join(PREFIXES)}: set others in spec.env",
        field_path=".nccl",
    ),
    Rule(
        rule=(
            f"!has(self.interface) || !has(self.nccl) || !self.nccl.exists(name, name in {list(INTERFACE_VARIABLES)!r})"
        ),
        message=f"interface sets {' and '.join(INTERFACE_VARIABLES)}: remove them from nccl, or remove interface",
        field_path=".interface",
    ),
]


def _networks_set_their_own_variables(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        where, network = f"pools[{index}].network", pool.network
        foreign = [name for name in network.nccl if not name.startswith(PREFIXES)]
        if foreign:
            remedy = f"sets only variables that begin with {', '.join(PREFIXES)}: set others in spec.env"
            yield f"{where}.nccl", foreign, remedy
        doubled = [name for name in INTERFACE_VARIABLES if name in network.nccl]
        if network.interface is not None and doubled:
            remedy = f"sets {', '.join(doubled)}, which nccl sets, too: remove them from nccl, or remove interface"
            yield f"{where}.interface", network.interface, remedy


NETWORK_CHECKS = (_networks_set_their_own_variables,)
