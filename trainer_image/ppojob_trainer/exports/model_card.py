"""The model card of an export: README.md with the hub's front matter. Pure; `folder.py` calls it.

Numbers are those of the run's own metrics. Of the spec it shows chosen settings, no environment and no arguments that
users name. The licence is taken from the base model's card, and left out if that has none.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ppojob_api.v1alpha1.algorithm import PolicyLoss
from ppojob_api.v1alpha1.data import DataSource
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.sources import hub_address, with_addresses
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.telemetry.progress import REWARD, VALIDATION_REWARD
from ppojob_trainer.telemetry.records import Record

_OF_THE_BASE = ("license", "license_name", "license_link", "language")
_VALIDATION = "val-core/"


@dataclass(frozen=True)
class CardFacts:
    """What a card says beside the job."""

    step: int
    records: Sequence[Record]
    """metrics.jsonl, in the order of the steps."""
    base_card: str
    """README.md of the base model; empty: it has none."""
    versions: Mapping[str, str]
    """Of packages, by their names."""


def model_card(job: JobFile, facts: CardFacts) -> str:
    """Return the text of README.md."""
    # job.json has the folders of what was fetched.
    spec, name = with_addresses(job.spec, job.sources), job.name
    parts = [
        f"---\n{yaml.safe_dump(_front_matter(spec, facts), sort_keys=False, allow_unicode=True)}---",
        f"# {name}",
        f"{_base(spec)}, trained by reinforcement learning ({_algorithm(spec)}) for {facts.step} steps with "
        f"ppojob. The weights are bfloat16{_lora(spec)}.",
        "## Use",
        f"Serve it with vLLM, with an API like OpenAI's:\n\n```sh\nvllm serve {shlex.quote(_served(spec))}\n```",
        _prompts(spec),
        "## Training",
        _table("setting", "value", _settings(spec)),
        "## Data",
        _table("data", "source", _data(spec)),
        "## Results",
        *_results(facts),
        "## Versions",
        _table("package", "version", facts.versions.items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _front_matter(spec: PPOJobSpec, facts: CardFacts) -> dict[str, Any]:
    base = _hub_name(spec.model.actor.path)
    given = _metadata(facts.base_card)
    return {
        **({"base_model": base} if base else {}),
        **{name: given[name] for name in _OF_THE_BASE if name in given},
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["ppojob", "reinforcement-learning", _tag(spec)],
    }


def _metadata(card: str) -> dict[str, Any]:
    """Return the front matter of a card; nothing if it has none that can be read."""
    if not card.startswith("---\n"):
        return {}
    try:
        found = yaml.safe_load(card[4:].partition("\n---")[0])
    except yaml.YAMLError:
        return {}
    return found if isinstance(found, dict) else {}


def _hub_name(path: str) -> str:
    """Return the name of a model on the hub, without its revision; empty: it is a folder or in a bucket."""
    address = hub_address(path)
    return address.repository if address is not None else ""


def _base(spec: PPOJobSpec) -> str:
    path = spec.model.actor.path
    # No link: the hub may be another one.
    return _code(_hub_name(path) or path.rstrip("/"))


def _served(spec: PPOJobSpec) -> str:
    target = spec.checkpoint.export_to or ""
    return _hub_name(target) or "./model"


def _algorithm(spec: PPOJobSpec) -> str:
    algorithm, own = spec.algorithm, "a function of the user"
    estimator, loss = algorithm.advantage_estimator.value, algorithm.policy_loss.value
    name = own if algorithm.advantage_function is not None else estimator
    parts = [f"PPO, advantages by {name}" if algorithm.needs_critic or name == own else name]
    if algorithm.policy_loss is not PolicyLoss.PPO:
        parts.append(f"policy loss {own if algorithm.policy_loss_function is not None else loss}")
    return ", ".join([*parts, "dynamic sampling"] if algorithm.dynamic_sampling is not None else parts)


def _tag(spec: PPOJobSpec) -> str:
    algorithm = spec.algorithm
    is_ppo = algorithm.needs_critic or algorithm.advantage_function is not None
    return "ppo" if is_ppo else algorithm.advantage_estimator.value.lower()


def _lora(spec: PPOJobSpec) -> str:
    return "; LoRA adapters are merged into them" if spec.model.actor.lora is not None else ""


def _prompts(spec: PPOJobSpec) -> str:
    words = []
    if spec.data.chat_template is not None:
        words.append("The chat template is the one of the training (`chat_template.jinja`).")
    if system := spec.data.train.system_prompt:
        words.append(f"The training's prompts had this system message: {_code(system)}")
    words += [
        f"The prompts of {source.name} had this system message: {_code(source.system_prompt)}"
        for source in spec.data.train.mixture or ()
        if source.system_prompt
    ]
    return "\n\n".join(words)


def _settings(spec: PPOJobSpec) -> Iterator[tuple[str, object]]:
    algorithm, actor, rollout = spec.algorithm, spec.actor, spec.rollout
    yield "algorithm", _algorithm(spec)
    yield "prompts per step", spec.data.train_batch_size
    yield "responses per prompt", rollout.samples_per_prompt
    yield "prompts per optimizer step", actor.mini_batch_size
    yield "passes over a batch", algorithm.epochs
    yield "learning rate", f"{actor.learning_rate:g}"
    if algorithm.needs_critic:
        yield "learning rate of the critic", f"{spec.critic.learning_rate:g}"
        yield "gamma, lambda", f"{algorithm.gamma:g}, {algorithm.lam:g}"
    yield "clip range", f"{1 - actor.clip_ratio_low:g} to {1 + actor.clip_ratio_high:g}"
    yield "KL to the reference", _kl(spec)
    yield "sampling", f"temperature {rollout.temperature:g}, top_p {rollout.top_p:g}, top_k {rollout.top_k}"
    yield "longest prompt, response", f"{spec.data.max_prompt_length}, {spec.data.max_response_length} tokens"
    if lora := spec.model.actor.lora:
        yield "LoRA", f"rank {lora.rank}, alpha {lora.alpha:g}"
    yield "reward", _reward(spec)
    yield "seed", spec.trainer.seed


def _kl(spec: PPOJobSpec) -> str:
    kl = spec.algorithm.kl
    parts = [
        *([f"in the reward, coefficient {kl.controller.coefficient:g}"] if kl.in_reward else []),
        *([f"in the loss, coefficient {kl.loss_coefficient:g}"] if kl.in_loss else []),
    ]
    return "; ".join(parts) or "none"


def _reward(spec: PPOJobSpec) -> str:
    function, model = spec.reward.function, spec.model.reward
    parts = []
    if spec.reward.uses_function and function is not None:
        parts.append(f"function {_code(f'{function.module or function.path}:{function.name}')}")
    if spec.reward.uses_model and model is not None:
        parts.append(f"model {_code(model.path)}")
    return " and ".join(parts)


def _data(spec: PPOJobSpec) -> Iterator[tuple[str, object]]:
    if spec.data.train.mixture is None:
        yield "training", _source(spec.data.train)
    for source in spec.data.train.mixture or ():
        yield f"training, {source.name} ({spec.data.shares[source.name]:.1%})", _source(source)
    if spec.data.validation is not None:
        yield "validation", _source(spec.data.validation)


def _source(source: DataSource) -> str:
    if gym := source.reasoning_gym:
        return f"reasoning-gym, task {_code(gym.task)}, {gym.size} problems, seed {gym.seed}"
    if hub := source.hugging_face:
        return f"{_code(hub.path)} {hub.name} split {hub.split}".replace("  ", " ")
    return ", ".join(map(_code, source.files.paths)) if source.files else ""


def _results(facts: CardFacts) -> Iterator[str]:
    rewards = {int(step): value for step, value in _curve(facts.records, REWARD) if step > 0}
    if rewards:
        first, last, best = min(rewards), max(rewards), max(rewards, key=lambda step: rewards[step])
        rows = ((f"{name}, step {step}", _number(rewards[step])) for name, step in
                (("first", first), ("best", best), ("last", last)))  # fmt: skip
        yield _table("mean score of the responses", "value", rows)
    validations = [int(step) for step, _ in _curve(facts.records, VALIDATION_REWARD)]
    if validations:
        first, last = validations[0], validations[-1]
        of = {int(record["step"] or 0): record for record in facts.records}
        names = sorted(name for name in of[last] if name.startswith(_VALIDATION) and of[last][name] is not None)
        rows = (
            (name, f"{_number(of[last][name])} ({_number(of[first].get(name))} at step {first:.0f})") for name in names
        )
        yield _table(f"validation at step {last:.0f}", "value", rows)
    if not rewards and not validations:
        yield "The run has recorded no scores."


def _curve(records: Sequence[Record], name: str) -> Iterator[tuple[float, float]]:
    for record in records:
        step, value = record.get("step"), record.get(name)
        if step is not None and value is not None:
            yield step, value


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.4g}"


def _table(left: str, right: str, rows: Any) -> str:
    lines = [f"| {left} | {right} |", "|---|---|", *(f"| {key} | {_cell(value)} |" for key, value in rows)]
    return "\n".join(lines)


def _cell(value: object) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _code(text: str) -> str:
    """Return a text in backquotes; more of them than it has itself."""
    text = " ".join(text.split())
    fence = "`"
    while fence in text:
        fence += "`"
    return f"{fence} {text} {fence}" if len(fence) > 1 else f"`{text}`"
