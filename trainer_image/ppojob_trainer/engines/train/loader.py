"""Creates the training engine that a PPOJob names, and the reward model's. Roles know no engine by its class.

Called by the roles' workers. Imports are inside the functions, because an engine imports transformers, which takes
seconds and which the driver and the other roles do not need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, cast

from ppojob_api.v1alpha1.engine import Engine, EngineClass
from ppojob_trainer.engines.errors import EngineClassError
from ppojob_trainer.engines.train.engine import EngineSetup, ScoringEngine, TrainEngine
from ppojob_trainer.user_code import UserCodeError, check_call, find_class, import_user_code

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig, PreTrainedModel

    from ppojob_api.v1alpha1.model import LoRA, RewardModel
    from ppojob_trainer.engines.train.mesh import ParallelMesh

__all__ = [
    "check_reward_model",
    "load_reward_model",
    "make_engine",
    "parameters_of_adapters",
    "parameters_of_stages",
]

OPTIONAL: Final = frozenset({"prepare_saves"})
METHODS: Final = tuple(name for name in vars(TrainEngine) if not name.startswith("_") and name not in OPTIONAL)
"""What a class must have, to be a `TrainEngine`."""


def make_engine(setup: EngineSetup) -> TrainEngine:
    """Create the engine of `setup.training.engine`, which loads nothing yet.

    Raises:
        EngineClassError: the user's class cannot be imported or created, or lacks a method.
    """
    if setup.training.engine is Engine.CLASS:
        block = setup.training.engine_class
        assert block is not None, "the spec is checked"
        return _of_user(setup, block)

    from ppojob_trainer.engines.train.fsdp.engine import FSDPEngine

    return FSDPEngine(setup)


def parameters_of_stages(language_model: PreTrainedModel, size: int, virtual: int) -> tuple[int, ...]:
    """Return how many parameters each of `size` ranks of a pipeline has in its `virtual` stages."""
    from ppojob_trainer.engines.train.fsdp import stages

    return stages.parameters_of_stages(language_model, size, virtual)


def parameters_of_adapters(language_model: PreTrainedModel, lora: LoRA) -> tuple[int, int]:
    """Return how many parameters the adapters of a model would have, and how many of them those of experts.

    Raises:
        ModelUnsupportedError: the model has no layers of a name in `lora.targetModules`.
    """
    from ppojob_trainer.engines.train.fsdp import lora as adapters

    return adapters.count_parameters(language_model, lora)


def _of_user(setup: EngineSetup, block: EngineClass) -> TrainEngine:
    field = f"{setup.section}.engineClass"
    try:
        module = import_user_code(field, block.module, block.path)
        found = find_class(module, block.class_name, f"{field}.className", f"{field}: {block.module or block.path}")
    except UserCodeError as error:
        raise EngineClassError(str(error)) from error.__cause__
    if missing := [name for name in METHODS if not callable(getattr(found, name, None))]:
        raise EngineClassError(
            f"{field}: {block.class_name} has no method {', '.join(missing)}: write all methods of TrainEngine "
            "(ppojob_trainer.engines.train.engine)"
        )
    try:
        check_call(found, block.kwargs, field, "an EngineSetup")
    except UserCodeError as error:
        raise EngineClassError(f"{error}. Correct the class, or {field}.kwargs") from error.__cause__
    return cast("TrainEngine", found(setup, **block.kwargs))


def check_reward_model(model: RewardModel) -> PretrainedConfig:
    """Read a reward model's configuration, seconds before its weights are loaded.

    Raises:
        ModelNotFoundError: there is none.
        ModelUnsupportedError: it is not a sequence classifier, or has no such label.
    """
    from ppojob_trainer.engines.train.fsdp import reward

    return reward.check_reward_model(model.path, model.label, model.trust_remote_code)


def load_reward_model(model: RewardModel, parallel: ParallelMesh, dtype: torch.dtype) -> ScoringEngine:
    """Load and shard the reward model. Collective; raises what `check_reward_model` raises."""
    from ppojob_trainer.engines.train.fsdp.reward import RewardModelEngine

    return RewardModelEngine(
        parallel,
        model.path,
        label=model.label,
        trust_remote_code=model.trust_remote_code,
        max_tokens_per_gpu=model.max_tokens_per_gpu,
        dtype=dtype,
    )
