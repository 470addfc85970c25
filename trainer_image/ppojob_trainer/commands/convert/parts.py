"""Converts what depends on several of verl's settings: data files, rewards, pools, adapters, the length of the run.

Each function removes the settings that it converts from `Draft.given`. It adds fields, entries to fill in, and
settings without a counterpart to the draft. `conversion` calls all of them, then `table` for the rest.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

from ppojob_api.v1alpha1.constants import NAME_MAX_LENGTH
from ppojob_api.v1alpha1.engine_rules import RESERVED_ENGINE_ARGS
from ppojob_api.v1alpha1.sources import is_repository_name
from ppojob_api.v1alpha1.versions import own_version
from ppojob_trainer.commands.convert.algorithm_parts import (
    clipping,
    divided_experts,
    dynamic_sampling,
    estimator,
    older_weights,
    overlong_responses,
    quantized_rollout,
    routing_replay,
)
from ppojob_trainer.commands.convert.draft import MOUNT, Draft
from ppojob_trainer.commands.convert.values import NotConvertibleError, number, whole

_MODEL = "actor_rollout_ref.model"


def name(draft: Draft) -> None:
    """The experiment's name becomes the object's."""
    given = draft.take("trainer.experiment_name")
    if given is not None:
        cleaned = re.sub(r"[^a-z0-9]+", "-", str(given).lower()).strip("-")
        cleaned = cleaned if cleaned[:1].isalpha() else f"job-{cleaned}"
        draft.name = cleaned[:NAME_MAX_LENGTH].strip("-")


def models(draft: Draft) -> None:
    """Models are folders in the volume, or repositories of the Hugging Face Hub."""
    path = draft.take(f"{_MODEL}.path")
    target = "model.actor.path"
    if path is None:
        draft.values[target] = f"{MOUNT}/models/actor"
        draft.to_fill.append((target, "no model is given: the folder of a HuggingFace checkpoint"))
    else:
        draft.values[target] = _model_path(draft, target, path)
    critic = draft.take("critic.model.path")
    draft.take("critic.model.tokenizer_path")
    if critic is None and draft.given.get("algorithm.adv_estimator", "gae") == "gae":
        why = "no critic.model.path is given: the critic starts from the actor's model, in verl from a default path"
        draft.to_fill.append(("model.critic.path", why))
    if critic is not None and critic != path:
        draft.values["model.critic.path"] = _model_path(draft, "model.critic.path", critic)
    reference = draft.take("actor_rollout_ref.ref.model.path")
    if reference is not None:
        draft.values["model.ref.path"] = _model_path(draft, "model.ref.path", reference)


def adapters(draft: Draft) -> None:
    """LoRA: rank 0 is none."""
    for verl, role in ((_MODEL, "actor"), ("critic.model", "critic")):
        rank, alpha = draft.take(f"{verl}.lora_rank"), draft.take(f"{verl}.lora_alpha", default=16)
        layers = draft.take(f"{verl}.target_modules", default="all-linear")
        megatron_rank, megatron_alpha = draft.take(f"{verl}.lora.rank"), draft.take(f"{verl}.lora.alpha", default=32)
        if not rank and megatron_rank:
            rank, alpha = megatron_rank, megatron_alpha
        if not rank:
            continue
        draft.values[f"model.{role}.lora.rank"] = whole(rank)
        draft.values[f"model.{role}.lora.alpha"] = number(alpha)
        if role == "actor" and "model.ref.path" not in draft.values:
            # The reference is the actor with its adapters off, so it has no parameters to offload.
            draft.take("actor_rollout_ref.ref.fsdp_config.param_offload")
        if layers != "all-linear":
            draft.values[f"model.{role}.lora.targetModules"] = layers if isinstance(layers, list) else [layers]


def sources(draft: Draft) -> None:
    """Training and validation files."""
    column = draft.take("data.prompt_key")
    for verl, target in (("data.train_files", "data.train"), ("data.val_files", "data.validation")):
        given = draft.take(verl)
        # A script with an unset variable gives an empty path.
        files = [file for file in (given if isinstance(given, list) else [given]) if file]
        if not files:
            if target == "data.train":
                files = [f"{MOUNT}/train.parquet"]
                draft.to_fill.append((f"{target}.files.paths", "no data.train_files is given: the files to train on"))
            else:
                why = "no data.val_files is given: verl reads a default path, here nothing is validated without files"
                draft.to_fill.append((target, why))
                continue
        draft.values[f"{target}.files.paths"] = [draft.path(f"{target}.files.paths", file) for file in files]
        if column is not None:
            draft.values[f"{target}.files.promptColumn"] = str(column)


def overlong_prompts(draft: Draft) -> None:
    """Prompts above maxPromptLength: filtered, truncated, or an error."""
    filters = draft.take("data.filter_overlong_prompts", default=False)
    kind = draft.take("data.truncation", default="error")
    if filters is True:
        draft.values["data.overlongPrompts"] = "Filter"
    elif kind == "left":
        # verl names the side that is cut off; what is kept here is the end.
        draft.values["data.overlongPrompts"] = "Truncate"
    elif kind == "error":
        draft.values["data.overlongPrompts"] = "Fail"
    else:
        why = (
            "data.overlongPrompts Truncate keeps the end of a prompt; Filter leaves it out, Fail (the default) refuses"
        )
        draft.unconverted.append(("data.truncation", kind, why))


def warmups(draft: Draft) -> None:
    """A warm-up as a share of the run needs the run's length."""
    total = draft.given.get("trainer.total_training_steps")
    for verl, role in (("actor_rollout_ref.actor", "actor"), ("critic", "critic")):
        ratio = draft.take(f"{verl}.optim.lr_warmup_steps_ratio", default=0)
        given = draft.given.get(f"{verl}.optim.lr_warmup_steps", -1)
        if not ratio or (isinstance(given, int) and given >= 0):
            continue
        target = f"{role}.learningRateWarmupSteps"
        if isinstance(total, int):
            draft.given.pop(f"{verl}.optim.lr_warmup_steps", None)
            draft.values[target] = int(float(ratio) * total)
        else:
            why = f"a share of the run's steps, which are not given: set {target}"
            draft.unconverted.append((f"{verl}.optim.lr_warmup_steps_ratio", ratio, why))


def validation_sampling(draft: Draft) -> None:
    """Without do_sample, verl takes the likeliest token whatever the temperature."""
    base = "actor_rollout_ref.rollout.val_kwargs"
    samples = draft.take(f"{base}.do_sample", default=False)
    temperature = draft.take(f"{base}.temperature", default=0)
    draft.values["rollout.validation.temperature"] = number(temperature) if samples else 0.0


def sequence_parallel(draft: Draft) -> None:
    """verl has two names for it, and takes the older one where that is above 1."""
    sections = (("actor", "actor_rollout_ref.actor", "fsdp_config"), ("critic", "critic", "fsdp"))
    for role, verl, engine in sections:
        given = [draft.take(f"{at}.ulysses_sequence_parallel_size") for at in (verl, f"{verl}.{engine}")]
        sizes = [whole(size) for size in given if size is not None]
        if sizes:
            draft.values[f"{role}.sequenceParallelSize"] = next((size for size in sizes if size > 1), 1)


def hybrid_sharding(draft: Draft) -> None:
    """verl's -1 means all ranks, and so does a size that is not below their number."""
    nodes, gpus = (draft.given.get(f"trainer.{name}") for name in ("nnodes", "n_gpus_per_node"))
    num_ranks = whole(1 if nodes is None else nodes) * whole(8 if gpus is None else gpus)
    for role, engine in (("actor", "actor_rollout_ref.actor.fsdp_config"), ("critic", "critic.fsdp")):
        size = whole(draft.take(f"{engine}.fsdp_size", default=-1))
        if 0 < size < num_ranks:
            draft.values[f"{role}.fsdpSize"] = size


def followers(draft: Draft) -> None:
    """Some of verl's settings are the actor's where they are not given."""
    for follower, leader in _FOLLOWERS.items():
        value = draft.given.get(leader)
        if value is not None and draft.given.get(follower) is None:
            draft.given[follower] = value


_FOLLOWERS: Mapping[str, str] = {
    "critic.ppo_mini_batch_size": "actor_rollout_ref.actor.ppo_mini_batch_size",
    "critic.loss_agg_mode": "actor_rollout_ref.actor.loss_agg_mode",
    "critic.model.trust_remote_code": "actor_rollout_ref.model.trust_remote_code",
    "actor_rollout_ref.ref.megatron.param_offload": "actor_rollout_ref.actor.megatron.param_offload",
}


def rewards(draft: Draft) -> None:
    """A reward function, a reward model, or verl's own functions by data_source."""
    path = draft.take("custom_reward_function.path", "reward.custom_reward_function.path")
    function = draft.take("custom_reward_function.name", "reward.custom_reward_function.name")
    kwargs = draft.take("custom_reward_function.reward_kwargs", "reward.custom_reward_function.reward_kwargs")
    is_model = draft.take("reward_model.enable", "reward.reward_model.enable", default=False)
    model = draft.take("reward_model.model.path", "reward.reward_model.model_path")
    if is_model is True:
        draft.values["reward.type"] = "Model"
        target = "model.reward.path"
        draft.values[target] = _model_path(draft, target, model or "models/reward")
        if model is None:
            draft.to_fill.append((target, "no reward model is given: the folder of a sequence-classification model"))
        if path is not None:
            why = "verl takes the reward model's scores where there is one: for their sum set reward.type Both"
            draft.unconverted.append(("custom_reward_function.path", path, why))
        return
    where = "reward.function"
    if path is not None:
        draft.values[f"{where}.path"] = draft.path(f"{where}.path", path)
        draft.values[f"{where}.name"] = str(function or "compute_score")
    else:
        draft.values[f"{where}.module"] = "ppojob_trainer.rewards.by_data_source"
        why = (
            "no custom_reward_function is given, so the function depends on data_source, as in verl: see "
            "docs/rewards.md for the names, or use your own function"
        )
        draft.to_fill.append((where, why))
    if kwargs:
        draft.values[f"{where}.kwargs"] = kwargs


def pools(draft: Draft) -> None:
    """The pools that verl makes: one for all roles, two of half the GPUs, or further ones for rollout and reward."""
    nodes = whole(draft.take("trainer.nnodes", default=1))
    gpus = whole(draft.take("trainer.n_gpus_per_node", default=8))
    draft.take("critic.enable")
    sizes = {"gpus": (nodes, gpus)}
    if draft.splits:
        half = (nodes, gpus // 2) if nodes < 2 else (nodes // 2, gpus)
        if half[1] == 0:
            raise NotConvertibleError("a split needs two GPUs or more")
        sizes = {"actor": half, "critic": half}
        draft.values |= {"placement.critic": "critic", "placement.reward": ["critic"]}
        draft.values |= {"placement.rollout": ["actor"], "placement.ref": ["actor"]}
        if nodes > 1 and nodes % 2:
            draft.unconverted.append(("trainer.nnodes", nodes, f"verl splits {nodes - 1} nodes and leaves one idle"))
    for role, (sections, is_asked) in _POOLS_OF_ROLES.items():
        size = [draft.take(*(f"{at}.{name}" for at in sections)) for name in ("nnodes", "n_gpus_per_node")]
        if all(size) and (is_asked is None or any(draft.given.get(f"{at}.{is_asked}") is True for at in sections)):
            sizes[role] = (whole(size[0]), whole(size[1]))
            draft.values[f"placement.{role}"] = [role]
    draft.values["pools"] = [{"name": name, "nodes": n, "gpusPerNode": g} for name, (n, g) in sizes.items()]
    if len(sizes) > 1:
        draft.values["placement.actor"] = next(iter(sizes))


# Sections that have a pool's size, and the setting there without which it says nothing.
_POOLS_OF_ROLES: Mapping[str, tuple[tuple[str, ...], str | None]] = {
    "rollout": (("rollout",), None),
    "reward": (("reward_model", "reward.reward_model"), "enable_resource_pool"),
}


def length(draft: Draft) -> None:
    """The number of steps, else the epochs: verl counts both as we do."""
    epochs = draft.take("trainer.total_epochs", default=30)
    if draft.given.get("trainer.total_training_steps") is None:
        draft.values["trainer.totalEpochs"] = whole(epochs)


def engine_arguments(draft: Draft) -> None:
    """vLLM's own arguments keep their names, apart from those that have a field here, or none by intent."""
    where = "actor_rollout_ref.rollout.engine_kwargs.vllm."
    for key in [key for key in draft.given if key.startswith(where)]:
        value = draft.take(key)
        argument, *path = key.removeprefix(where).split(".")
        argument = argument.replace("-", "_")
        if value is None:
            continue
        if argument in RESERVED_ENGINE_ARGS:
            draft.unconverted.append((key, value, RESERVED_ENGINE_ARGS[argument]))
        else:
            draft.values[".".join(("rollout.engineArgs", argument, *path))] = value


def resuming(draft: Draft) -> None:
    """resume_mode auto, disable or resume_path."""
    mode, path = draft.take("trainer.resume_mode", default="auto"), draft.take("trainer.resume_from_path")
    draft.values["checkpoint.resume"] = "Never" if mode == "disable" else "Auto"
    if mode == "resume_path" and path:
        why = "a checkpoint of verl cannot be read: export it as a HuggingFace folder, and set model.actor.path"
        draft.unconverted.append(("trainer.resume_from_path", path, why))


def trackers(draft: Draft) -> None:
    """Console, TensorBoard and a file are always written."""
    given = draft.take("trainer.logger")
    if given is None:
        return
    names = [str(entry).lower() for entry in (given if isinstance(given, list) else [given])]
    known = {"wandb": "WandB", "mlflow": "MLflow"}
    draft.values["telemetry.trackers"] = [known[entry] for entry in dict.fromkeys(names) if entry in known]
    others = [entry for entry in names if entry not in known and entry not in ("console", "tensorboard", "file")]
    if others:
        why = "metrics go to the console, metrics.jsonl, TensorBoard, Prometheus, and WandB or MLflow if asked for"
        draft.unconverted.append(("trainer.logger", others, why))


def cluster(draft: Draft) -> None:
    """What verl does not know of."""
    draft.values["image"] = f"ppojob-trainer-cuda:{own_version()}"
    draft.values["storage.claimName"] = "ppojob-data"
    draft.values["storage.mountPath"] = MOUNT
    draft.to_fill.append(("image", "the trainer's image in your registry"))
    draft.to_fill.append(("storage.claimName", "your claim, with the models and the data in it"))


def _model_path(draft: Draft, target: str, value: object) -> str:
    text = str(value)
    return f"hf://{text}" if is_repository_name(text) else draft.path(target, value)


TOGETHER: tuple[Callable[[Draft], None], ...] = (
    name, models, adapters, sources, overlong_prompts, warmups, validation_sampling, sequence_parallel, hybrid_sharding,
    clipping,
    estimator, dynamic_sampling, routing_replay, divided_experts, quantized_rollout, overlong_responses,
    followers, rewards, older_weights, pools,
    engine_arguments, length, resuming, trackers, cluster,
)  # fmt: skip


def draft_of(given: Mapping[str, Any], *, splits: bool = False, is_one_step_off: bool = False) -> Draft:
    """Return a draft with all that needs several settings; the rest of them is left in `given`."""
    draft = Draft(dict(given), splits=splits, is_one_step_off=is_one_step_off)
    for part in TOGETHER:
        before = dict(draft.given)
        try:
            part(draft)
        except NotConvertibleError as error:
            taken = [key for key in before if key not in draft.given]
            draft.unconverted += [(key, before[key], str(error)) for key in taken]
    return draft
