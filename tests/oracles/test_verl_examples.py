"""Every launch script among verl's examples: what becomes of it was reviewed, and its numbers are those of Hydra.

It needs verl's sources, whose examples are in no package: VERL_CHECKOUT names their folder. Whole tables are for the
versions in `verl_tables/`; the numbers are compared for any version.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ppojob_api.v1alpha1.algorithm import PolicyLoss
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.commands.convert import Conversion, Settings, convert
from ppojob_trainer.commands.convert.config_files import flat
from tests.oracles.verl_examples import Example, checkout, composed, examples_of, reviewed, version_of

ROOT = checkout()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(ROOT is None, reason="VERL_CHECKOUT is not set: the folder of a git checkout of verl"),
]

_LOSSES = {PolicyLoss.PPO: "vanilla", PolicyLoss.GSPO: "gspo", PolicyLoss.CISPO: "cispo"}
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
    f"{_A}.loss_agg_mode": lambda spec: spec.actor.loss_aggregation.name.lower().replace("_", "-"),
    f"{_R}.n": lambda spec: spec.rollout.samples_per_prompt,
    f"{_R}.temperature": lambda spec: spec.rollout.temperature,
    f"{_R}.tensor_model_parallel_size": lambda spec: spec.rollout.tensor_parallel_size,
    f"{_R}.gpu_memory_utilization": lambda spec: spec.rollout.gpu_memory_utilization,
    # Dr.GRPO is verl's grpo without norm_adv_by_std_in_grpo.
    f"{_P}.adv_estimator": lambda spec: spec.algorithm.advantage_estimator.name.lower().removeprefix("dr_"),
    f"{_A}.policy_loss.loss_mode": lambda spec: _LOSSES[spec.algorithm.policy_loss],
    f"{_P}.gamma": lambda spec: spec.algorithm.gamma,
    f"{_P}.lam": lambda spec: spec.algorithm.lam,
    f"{_P}.use_kl_in_reward": lambda spec: spec.algorithm.kl.in_reward,
    "trainer.save_freq": lambda spec: spec.checkpoint.every_steps or -1,
    "trainer.test_freq": lambda spec: spec.trainer.validate_every_steps or -1,
}
# Paths that verl's configuration names are the user's to fill in where a script does not. verl 0.9 asks vLLM for
# log-probs, 0.8 does not.
_OTHERWISE = ("data.validation", "model.critic.path", "model.actor.path", "data.train.files", "rollout.logProbs")
# Hydra itself refuses the launch: what verl would train with is not known.
REFUSED_BY_HYDRA = ("Could not override", "Could not append to config", "Could not find", "OverrideParseException")

Compositions = list[tuple[Example, Conversion, dict[str, Any]]]


@pytest.fixture(scope="module")
def compositions(tmp_path_factory: pytest.TempPathFactory) -> Compositions:
    assert ROOT is not None
    examples = [example for example in examples_of(ROOT) if example.is_valid]
    found: Compositions = []
    for example, config in zip(examples, composed(examples, tmp_path_factory.mktemp("verl")), strict=True):
        if "error" in config:
            assert any(words in config["error"] for words in REFUSED_BY_HYDRA), (example.name, config)
        elif isinstance(example.conversion, Conversion):
            found.append((example, example.conversion, config))
    return found


def test_each_script_becomes_what_was_reviewed() -> None:
    assert ROOT is not None
    expected = reviewed(version_of(ROOT))
    if expected is None:
        pytest.skip(f"no table of verl {version_of(ROOT)}: python -m tests.oracles.verl_examples writes one")

    assert [example.row() for example in examples_of(ROOT)] == expected


def test_numbers_are_those_of_verls_own_configuration(compositions: Compositions) -> None:
    wrong: list[tuple[Any, ...]] = []
    for example, conversion, config in compositions:
        known, spec = dict(flat(config)), spec_of(conversion)
        unconverted = {entry.name for entry in conversion.unconverted}
        found = {name: (known[name], get(spec)) for name, get in SAME.items() if name not in unconverted}
        wrong += [(example.name, name, *pair) for name, pair in found.items() if pair[0] != pair[1]]
        if sum(pool.gpus for pool in spec.pools) != known["trainer.nnodes"] * known["trainer.n_gpus_per_node"]:
            wrong.append((example.name, "GPUs", spec.pools))

    assert wrong == []


def test_settings_and_the_whole_configuration_become_the_same_job(compositions: Compositions) -> None:
    different = []
    for example, conversion, config in compositions:
        whole = convert(Settings(dict(flat(config)), is_whole=True, splits=example.launch.program.splits))
        # A script that asks for its own folder has absolute paths of the checkout, which verl's answer has as `.`.
        ours, theirs = below_data(fields_of(conversion)), fields_of(whole)
        names = [name for name in sorted(ours | theirs) if not name.startswith(_OTHERWISE)]
        different += [(example.name, n, ours.get(n), theirs.get(n)) for n in names if ours.get(n) != theirs.get(n)]

    assert different == []


def spec_of(conversion: Conversion) -> PPOJobSpec:
    return parse_manifest(conversion.manifest)[2]


def fields_of(conversion: Conversion) -> dict[str, Any]:
    return dict(flat(spec_of(conversion).model_dump(by_alias=True)))


def below_data(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the checkout's paths as a conversion has relative ones: below /data."""
    return {
        name: each.replace(f"{ROOT}/", "/data/") if isinstance(each, str) else each for name, each in fields.items()
    }
