"""Rules of `spec.pools[]` about devices: slices of a GPU, and devices that come by claims.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.spec import PPOJobSpec

MIG_PREFIX = "nvidia.com/mig-"
"""Beginning of the resources that NVIDIA's device plugin gives to slices of a GPU."""

DEVICE_RULES = [
    Rule(
        rule=(
            f"!has(self.gpuResourceName) || !self.gpuResourceName.startsWith('{MIG_PREFIX}') || "
            "!has(self.gpusPerNode) || self.gpusPerNode == 1"
        ),
        message="CUDA finds one MIG slice in a pod: set gpusPerNode to 1 and use more nodes",
        field_path=".gpusPerNode",
    ),
]
"""Of a pool alone."""

_SAYS_NOTHING = "has(p.resourceClaims) && size(p.resourceClaims) > 0 && !has(p.gpuResourceName)"

CLAIM_RULES = [
    Rule(
        rule=f"!self.pools.exists(p, {_SAYS_NOTHING})",
        message=(
            "with resourceClaims, gpuResourceName is required: set it to '' if a claim has the GPUs, else to the GPUs' "
            "resource name"
        ),
        field_path=".pools",
        value=f"self.pools.filter(p, {_SAYS_NOTHING}).map(p, p.name)",
    ),
]
"""Of the whole spec, because the template may have one of the two."""


def _slices_are_alone_in_their_pods(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        if (pool.gpu_resource_name or "").startswith(MIG_PREFIX) and pool.gpus_per_node != 1:
            remedy = (
                f"CUDA finds one MIG slice in a pod ({pool.gpu_resource_name}): set gpusPerNode to 1 and use more nodes"
            )
            yield f"pools[{index}].gpusPerNode", pool.gpus_per_node, remedy


def _claims_say_where_the_gpus_come_from(spec: PPOJobSpec) -> Iterator[Problem]:
    for index, pool in enumerate(spec.pools):
        names = [claim.name for claim in pool.resource_claims]
        if names and pool.gpu_resource_name is None:
            remedy = (
                "with resourceClaims, gpuResourceName is required: set it to '' if a claim has the GPUs, else to "
                "the GPUs' resource name"
            )
            yield f"pools[{index}].resourceClaims", names, remedy
        for name in sorted({name for name in names if names.count(name) > 1}):
            yield (
                f"pools[{index}].resourceClaims",
                name,
                "another claim has this name: give each claim a different name",
            )


DEVICE_CHECKS = (_slices_are_alone_in_their_pods, _claims_say_where_the_gpus_come_from)
