"""Rules of `spec.model`: adapters and offloading against device, placement and gradient checkpointing.

`rules.py` puts them beside the others, each in CEL and in Python.
"""

from collections.abc import Iterator

from ppojob_api.v1alpha1.base import Problem, Rule
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec

_TRAINED = ("actor", "critic")
_OFFLOADING = (
    *(
        f"{role}.{field}"
        for role in _TRAINED
        for field in ("activationOffload", "offload.parameters", "offload.optimizer")
    ),
    "ref.offload.parameters",
)
_REFERENCE_IS_ACTOR = "(has(self.model.actor.lora) && !has(self.model.ref.path))"

MODEL_RULES = [
    *(
        Rule(
            rule=f"!self.model.{role}.activationOffload || self.model.{role}.gradientCheckpointing",
            message=(
                "activationOffload moves the tensors that gradientCheckpointing keeps: set gradientCheckpointing to "
                "true, too"
            ),
            field_path=f".model.{role}.activationOffload",
        )
        for role in _TRAINED
    ),
    *(
        Rule(
            rule=f"self.device != 'CPU' || !self.model.{path}",
            message="with device CPU, everything is already in the host's memory: remove it",
            field_path=f".model.{path}",
        )
        for path in _OFFLOADING
    ),
    Rule(
        rule=(
            f"!{_REFERENCE_IS_ACTOR} || !has(self.placement) || !has(self.placement.ref) || "
            "self.placement.ref == [self.placement.actor]"
        ),
        message=(
            "with model.actor.lora the reference is the actor with its adapters off, in the actor's pool: "
            "remove placement.ref, or set model.ref.path"
        ),
        field_path=".placement.ref",
    ),
    Rule(
        rule=f"!{_REFERENCE_IS_ACTOR} || !self.model.ref.offload.parameters",
        message=(
            "with model.actor.lora the reference is the actor itself: set model.actor.offload instead, or set "
            "model.ref.path"
        ),
        field_path=".model.ref.offload.parameters",
    ),
]


def _activation_offload_needs_checkpointing(spec: PPOJobSpec) -> Iterator[Problem]:
    for role, model in (("actor", spec.model.actor), ("critic", spec.model.critic)):
        if model.activation_offload and not model.gradient_checkpointing:
            remedy = "moves the tensors that gradientCheckpointing keeps: set gradientCheckpointing to true, too"
            yield f"model.{role}.activationOffload", True, remedy


def _the_cpu_has_nothing_to_offload(spec: PPOJobSpec) -> Iterator[Problem]:
    if spec.device is not Device.CPU:
        return
    model = spec.model
    asked = (
        *(
            is_asked
            for trained in (model.actor, model.critic)
            for is_asked in (trained.activation_offload, trained.offload.parameters, trained.offload.optimizer)
        ),
        model.ref.offload.parameters,
    )
    for path, is_asked in zip(_OFFLOADING, asked, strict=True):
        if is_asked:
            yield f"model.{path}", True, "with device CPU, everything is already in the host's memory: remove it"


def _a_reference_without_adapters_is_the_actor(spec: PPOJobSpec) -> Iterator[Problem]:
    if not spec.model.reference_is_actor:
        return
    others = [pool for pool in spec.placement.ref_pools if pool != spec.placement.actor]
    if others:
        remedy = (
            "with model.actor.lora the reference is the actor with its adapters off, in the actor's pool: "
            f"remove this field, or set model.ref.path (the actor's path for a copy in pool {others[0]})"
        )
        yield f"placement.ref[{spec.placement.ref_pools.index(others[0])}]", others[0], remedy
    if spec.model.ref.offload.parameters:
        remedy = (
            "with model.actor.lora the reference is the actor itself: set model.actor.offload instead, or set "
            "model.ref.path"
        )
        yield "model.ref.offload.parameters", True, remedy


MODEL_CHECKS = (
    _activation_offload_needs_checkpointing,
    _the_cpu_has_nothing_to_offload,
    _a_reference_without_adapters_is_the_actor,
)
