"""From a file and `--set` to a PPOJob: what YAML may do, and what is refused with its place."""

import copy
from pathlib import Path
from typing import Any

import pytest
import yaml

from ppojob_api.v1alpha1.validation import SpecError
from ppojob_trainer.commands.manifest import ManifestError, load, problems
from ppojob_trainer.commands.overrides import apply_override
from tests.bad_specs import BAD_SPECS, GOOD, BadSpec


def _file(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "ppojob.yaml"
    path.write_text(text)
    return path


@pytest.fixture
def good(tmp_path: Path) -> Path:
    return _file(tmp_path, yaml.safe_dump(GOOD))


def test_relative_paths_are_those_of_the_folder_only_where_one_is_given(tmp_path: Path, good: Path) -> None:
    sets = ["model.actor.path=own/models/small"]

    assert load(good, sets, folder=tmp_path).spec.model.actor.path == str(tmp_path / "own" / "models" / "small")
    with pytest.raises(SpecError, match=r"spec\.model\.actor\.path: 'own/models/small': must be an absolute path"):
        load(good, sets)


def _with_data_set(folder: Path, path: str) -> Path:
    manifest = copy.deepcopy(GOOD)
    manifest["spec"]["data"]["train"] = {"huggingFace": {"path": path}}
    return _file(folder, yaml.safe_dump(manifest))


def test_the_page_of_a_data_set_gets_the_form_of_its_address(tmp_path: Path) -> None:
    page = "https://huggingface.co/datasets/openai/gsm8k"

    with pytest.raises(SpecError, match=r"spec\.data\.train\.huggingFace\.path: .*write hf://openai/gsm8k"):
        load(_with_data_set(tmp_path, page), folder=tmp_path)


def test_an_address_is_no_relative_path(tmp_path: Path) -> None:
    source = load(_with_data_set(tmp_path, "hf://openai/gsm8k"), folder=tmp_path).spec.data.train.hugging_face

    assert source is not None
    assert source.path == "hf://openai/gsm8k"


# YAML.


def test_a_file_gives_its_job(good: Path) -> None:
    manifest = load(good)

    assert (manifest.namespace, manifest.name, manifest.spec.data.train_batch_size) == ("default", "good", 16)


def test_the_job_is_found_among_other_documents(tmp_path: Path) -> None:
    config_map = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "x"}}
    path = _file(tmp_path, yaml.safe_dump_all([None, config_map, GOOD]))

    assert load(path).name == "good"


def test_a_merge_key_brings_in_what_is_not_given(tmp_path: Path) -> None:
    source = "{reasoningGym: &task {task: gcd, size: 9, seed: 1}}"
    block = f"train: {source}\n    validation: {{reasoningGym: {{<<: *task, seed: 2}}}}"
    manifest = copy.deepcopy(GOOD)
    manifest["spec"]["data"]["train"] = "HERE"
    text = yaml.safe_dump(manifest).replace("train: HERE", block)

    data = load(_file(tmp_path, text), ["data.validation.reasoningGym.size=3"]).spec.data

    assert data.train.reasoning_gym is not None
    assert data.validation is not None
    assert data.validation.reasoning_gym is not None
    assert (data.train.reasoning_gym.seed, data.train.reasoning_gym.size) == (1, 9)
    assert (data.validation.reasoning_gym.task, data.validation.reasoning_gym.seed) == ("gcd", 2)
    # The option changed the place that it names, not the anchor.
    assert data.validation.reasoning_gym.size == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "it contains nothing"),
        ("- 1\n- 2\n", "it contains a list"),
        ("kind: ConfigMap\nmetadata: {name: x}\n", "it contains ConfigMap x"),
        ("kind: PPOJob\n---\nkind: PPOJob\nmetadata: {name: b}\n", "it contains PPOJob, PPOJob b"),
        ("a: [1\n", "it is not YAML"),
        ("spec:\n  a: {}\nb: {}\n  c: {}\n", "line 4, column 3: expected <block end>"),
        ("spec:\n\ta: 1\n", "any token: check this line, and the indentation"),
        ("a: 1\na: 2\n", "a is given twice"),
        ("a: !!python/object:os.system {}\n", "it is not YAML"),
    ],
    ids=["empty", "a list", "another kind", "two jobs", "broken", "indentation", "a tab", "a key twice", "code"],
)
def test_a_file_without_one_job_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ManifestError) as caught:
        load(_file(tmp_path, text))

    assert said in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path}/ppojob.yaml: ")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ManifestError, match=r"none\.yaml: it cannot be read"):
        load(tmp_path / "none.yaml")


@pytest.mark.parametrize("bad", [bad for bad in BAD_SPECS if bad.path != "kind"], ids=lambda bad: bad.name)
def test_every_bad_spec_is_reported_as_path_and_message(tmp_path: Path, bad: BadSpec) -> None:
    path = _file(tmp_path, yaml.safe_dump(bad.manifest()))

    with pytest.raises(SpecError) as caught:
        load(path)

    assert any(line.startswith(f"{bad.path}:") and bad.says in line for line in problems(caught.value))


# --set.


def _set(*overrides: str) -> dict[str, Any]:
    raw = copy.deepcopy(GOOD)
    for override in overrides:
        apply_override(raw, override)
    return raw


@pytest.mark.parametrize(
    ("override", "place", "value"),
    [
        ("trainer.totalSteps=4", ("spec", "trainer", "totalSteps"), 4),
        ("spec.trainer.totalSteps=4", ("spec", "trainer", "totalSteps"), 4),
        ("metadata.name=other", ("metadata", "name"), "other"),
        ("pools.actor.nodes=2", ("spec", "pools", 0, "nodes"), 2),
        ("pools[1].nodes=2", ("spec", "pools", 1, "nodes"), 2),
        ("pools.1.nodes=2", ("spec", "pools", 1, "nodes"), 2),
        ("actor.learningRate=1e-5", ("spec", "actor", "learningRate"), 1e-5),
        ("algorithm.kl={inReward: true}", ("spec", "algorithm", "kl"), {"inReward": True}),
        ("rollout.stop=[a, b]", ("spec", "rollout", "stop"), ["a", "b"]),
        ("model.actor.path=/a=b", ("spec", "model", "actor", "path"), "/a=b"),
        ("image=", ("spec", "image"), ""),
        ("data.train.reasoningGym.config.min_terms=3", ("spec", "data", "train", "reasoningGym", "config"),
         {"min_terms": 3}),
        (r"pools.actor.nodeSelector.kubernetes\.io/hostname=a", ("spec", "pools", 0, "nodeSelector"),
         {"kubernetes.io/hostname": "a"}),
    ],
)  # fmt: skip
def test_an_option_sets_one_value(override: str, place: tuple[str | int, ...], value: object) -> None:
    node: Any = _set(override)
    for step in place:
        node = node[step]

    assert node == value


def test_null_takes_a_field_out() -> None:
    assert "critic" not in _set("placement.critic=null")["spec"]["placement"]
    assert [pool["name"] for pool in _set("pools.critic=null")["spec"]["pools"]] == ["actor"]


def test_options_are_applied_in_their_order() -> None:
    raw = _set("trainer={totalSteps: 4}", "trainer.totalSteps=5", "trainer.seed=6")

    assert raw["spec"]["trainer"] == {"totalSteps": 5, "seed": 6}


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("trainer.totalStep=4", "--set spec.trainer.totalStep: there is no such field: did you mean totalSteps"),
        ("pols.actor.nodes=2", "spec.pols: there is no such field: did you mean pools"),
        ("pools.rollout.nodes=2", "spec.pools.rollout: the list has no item of this name; there is actor or critic"),
        ("pools[2].nodes=2", "spec.pools[2]: the list has 2 items; the first is [0]"),
        ("env.TOKEN.value=x", "spec.env.TOKEN: the list has no item of this name; there is none"),
        ("image.tag=2", "spec.image: 'trainer:1': this is a value, it has no field tag"),
        ("actor[0]=2", "spec.actor: this is not a list: write a field name instead of [0]"),
        ("metadata.nam=x", "metadata.nam: there is no such field: did you mean name"),
        ("trainer.totalSteps", "write --set path=value"),
        ("=4", "write --set path=value"),
        ("a[b=4", "this is not a path"),
        ("actor=[1", "the value is not YAML"),
    ],
)
def test_an_option_that_names_nothing_is_refused_with_the_existing_names(override: str, said: str) -> None:
    with pytest.raises(SpecError) as caught:
        _set(override)

    assert said in str(caught.value)


def test_a_value_of_the_wrong_type_is_refused_by_the_spec(good: Path) -> None:
    with pytest.raises(SpecError, match=r"spec\.trainer\.totalSteps: 'many'"):
        load(good, ["trainer.totalSteps=many"])


def test_a_number_may_be_written_with_an_exponent(good: Path) -> None:
    assert load(good, ["actor.learningRate=1e-5"]).spec.actor.learning_rate == 1e-5


# Modules of this package.


def test_a_module_that_this_package_does_not_have_is_refused_with_the_one_that_may_be_meant(good: Path) -> None:
    with pytest.raises(SpecError) as caught:
        load(good, ["reward={function: {module: ppojob_trainer.rewards.gsm8kk}}"])

    [problem] = problems(caught.value)
    assert problem == (
        "spec.reward.function.module: 'ppojob_trainer.rewards.gsm8kk': this version of ppojob_trainer has no such "
        "module: did you mean ppojob_trainer.rewards.gsm8k?"
    )


def test_a_module_in_the_arguments_of_another_one_is_looked_up_too(good: Path) -> None:
    weighted = (
        "{module: ppojob_trainer.rewards.weighted, kwargs: {functions: [{name: a, module: ppojob_trainer.no.a}]}}"
    )

    with pytest.raises(SpecError, match=r"spec\.reward\.function\.kwargs\.functions\[0\]\.module: 'ppojob_trainer\.no"):
        load(good, [f"reward={{function: {weighted}}}"])


@pytest.mark.parametrize("module", ["ppojob_trainer.rewards.gsm8k", "ppojob_trainer_of_mine.rewards", "team.rewards"])
def test_existing_modules_and_those_of_other_packages_are_accepted(good: Path, module: str) -> None:
    manifest = load(good, [f"reward={{function: {{module: {module}}}}}"])

    assert manifest.spec.reward.function is not None
    assert manifest.spec.reward.function.module == module
