"""Every launch script among verl's examples: what becomes of it was reviewed, and its numbers are those of Hydra."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.commands.convert import Settings, convert
from ppojob_trainer.commands.convert.config_files import flat
from tests.oracles.verl_examples import Example, checkout, composed, examples_of, reviewed, version_of

ROOT = checkout()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(ROOT is None, reason="VERL_CHECKOUT is not set: the folder of a git checkout of verl"),
]

_A, _R, _P = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "algorithm"
SAME: dict[str, Callable[[PPOJobSpec], Any]] = {
    "data.train_batch_size": lambda spec: spec.data.train_batch_size,
    "data.max_prompt_length": lambda spec: spec.data.max_prompt_length,
    "data.max_response_length": lambda spec: spec.data.max_response_length,
    f"{_A}.ppo_mini_batch_size": lambda spec: spec.actor.mini_batch_size,
    f"{_A}.optim.lr": lambda spec: spec.actor.learning_rate,
    f"{_A}.optim.weight_decay": lambda spec: spec.actor.weight_decay,
    f"{_A}.entropy_coeff": lambda spec: spec.actor.entropy_coefficient,
    f"{_A}.ppo_epochs": lambda spec: spec.algorithm.epochs,
    f"{_A}.use_kl_loss": lambda spec: spec.algorithm.kl.in_loss,
    f"{_A}.kl_loss_coef": lambda spec: spec.algorithm.kl.loss_coefficient,
    f"{_A}.clip_ratio_high": lambda spec: spec.actor.clip_ratio_high,
    f"{_R}.n": lambda spec: spec.rollout.samples_per_prompt,
    f"{_R}.temperature": lambda spec: spec.rollout.temperature,
    f"{_R}.tensor_model_parallel_size": lambda spec: spec.rollout.tensor_parallel_size,
    f"{_R}.gpu_memory_utilization": lambda spec: spec.rollout.gpu_memory_utilization,
    f"{_P}.gamma": lambda spec: spec.algorithm.gamma,
    f"{_P}.lam": lambda spec: spec.algorithm.lam,
    f"{_P}.use_kl_in_reward": lambda spec: spec.algorithm.kl.in_reward,
    "trainer.save_freq": lambda spec: spec.checkpoint.every_steps or -1,
    "trainer.test_freq": lambda spec: spec.trainer.validate_every_steps or -1,
}
# Reported as the user's to fill in where the script does not set them: paths that verl's configuration names.
_EXAMPLE_PATHS = ("data.validation", "model.critic.path", "data.train.files")


def valid_ones() -> list[Example]:
    assert ROOT is not None
    return [example for example in examples_of(ROOT) if example.conversion is not None and example.conversion.is_valid]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Example, dict[str, Any]]]:
    examples = valid_ones()
    return list(zip(examples, composed(examples, tmp_path_factory.mktemp("verl")), strict=True))


def test_each_script_becomes_what_was_reviewed() -> None:
    assert ROOT is not None
    expected = reviewed(version_of(ROOT))
    if expected is None:
        pytest.skip(f"no table of verl {version_of(ROOT)}: python -m tests.oracles.verl_examples writes one")

    assert [example.row() for example in examples_of(ROOT)] == expected


def test_numbers_are_those_of_verls_own_configuration(both: list[tuple[Example, dict[str, Any]]]) -> None:
    wrong = []
    for example, config in both:
        if "error" in config:
            wrong.append((example.name, config["error"]))
            continue
        known, spec, lost = dict(flat(config)), spec_of(example), lost_by(example)
        found = {name: (known[name], get(spec)) for name, get in SAME.items() if name not in lost}
        wrong += [(example.name, name, *pair) for name, pair in found.items() if pair[0] != pair[1]]
        if sum(pool.gpus for pool in spec.pools) != known["trainer.nnodes"] * known["trainer.n_gpus_per_node"]:
            wrong.append((example.name, "GPUs", spec.pools))

    assert wrong == []


def test_settings_and_the_whole_configuration_become_the_same_job(both: list[tuple[Example, dict[str, Any]]]) -> None:
    different = []
    for example, config in both:
        assert example.conversion is not None
        splits = example.launch.program.splits
        whole = convert(Settings(dict(flat(config)), is_whole=True, splits=splits)).manifest
        ours, theirs = (
            dict(flat(parse_manifest(m)[2].model_dump(by_alias=True))) for m in (example.conversion.manifest, whole)
        )
        names = [name for name in sorted(ours | theirs) if not name.startswith(_EXAMPLE_PATHS)]
        different += [(example.name, n, ours.get(n), theirs.get(n)) for n in names if ours.get(n) != theirs.get(n)]

    assert different == []


def spec_of(example: Example) -> PPOJobSpec:
    assert example.conversion is not None
    return parse_manifest(example.conversion.manifest)[2]


def lost_by(example: Example) -> set[str]:
    assert example.conversion is not None
    return {entry.name for entry in example.conversion.lost}
