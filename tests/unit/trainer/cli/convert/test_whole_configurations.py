"""Verl's whole configuration, defaults included, as a YAML file: what was the user's choice, and what was not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from ppojob_trainer.commands.convert import Settings, convert
from ppojob_trainer.commands.convert.read import read_yaml
from ppojob_trainer.commands.manifest import ManifestError


def test_a_whole_configuration_with_its_defaults_loses_nothing() -> None:
    text = """
    actor_rollout_ref:
      model: {path: /data/m, lora_rank: 0, external_lib: null, override_config: {}}
      actor: {_target_: verl.workers.config.FSDPActorConfig, ppo_mini_batch_size: 32, shuffle: false, tau_pos: 1.0}
      rollout: {name: vllm, n: 1, response_length: "${oc.select:data.x,512}", engine_kwargs: {vllm: {}}}
    critic: {ppo_mini_batch_size: "${oc.select:actor_rollout_ref.actor.ppo_mini_batch_size,256}", enable: null}
    data: {train_files: /data/a.jsonl, train_batch_size: 64, shuffle: false}
    trainer: {total_training_steps: 7, val_before_train: false, project_name: p}
    custom_reward_function: {path: /data/r.py, reward_kwargs: {scale: 2}}
    """
    conversion = convert(read_yaml(Path("verl.yaml"), text))

    spec = conversion.manifest["spec"]
    assert conversion.unconverted == []
    assert spec["critic"]["miniBatchSize"] == 32
    assert spec["data"]["shuffle"] is False
    assert spec["data"]["train"]["files"]["paths"] == ["/data/a.jsonl"]
    assert spec["trainer"]["validateBeforeTraining"] is False
    assert spec["reward"]["function"]["kwargs"] == {"scale": 2}


@pytest.mark.parametrize(
    ("text", "message"),
    [("kind: PPOJob", "not a configuration of verl"), ("a: [", "not YAML")],
)
def test_a_yaml_file_that_is_not_verls_is_refused(text: str, message: str) -> None:
    with pytest.raises(ManifestError, match=re.escape(message)):
        read_yaml(Path("a.yaml"), text)


@pytest.mark.parametrize(("is_whole", "saved"), [(True, None), (False, False)])
def test_verls_default_of_slower_saves_counts_only_where_it_was_given(is_whole: bool, saved: bool | None) -> None:
    settings = {"actor_rollout_ref.actor.checkpoint.async_save": False}
    manifest = convert(Settings(settings, is_whole=is_whole)).manifest

    assert manifest["spec"].get("checkpoint", {}).get("async") is saved
