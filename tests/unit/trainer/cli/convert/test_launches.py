"""Which pools a launch of verl becomes, and where settings come from that it does not name itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.commands.convert import Conversion, Options, convert, read, read_arguments
from tests.unit.trainer.cli.convert.test_convert import SAID, unconverted, value_at


class TestPools:
    def pools(self, *words: str) -> tuple[list[tuple[str, int, int]], dict[str, str]]:
        conversion = convert(read_arguments([*words, *SAID]))
        parse_manifest(conversion.manifest)
        pools = value_at(conversion, "pools")
        return [(p["name"], p["nodes"], p["gpusPerNode"]) for p in pools], value_at(conversion, "placement")

    @pytest.mark.parametrize(
        ("nodes", "gpus", "half"), [(1, 8, (1, 4)), (2, 8, (1, 8)), (4, 2, (2, 2)), (3, 2, (1, 2)), (1, 5, (1, 2))]
    )
    def test_split_placement_halves_the_gpus_as_verls_example_does(
        self, nodes: int, gpus: int, half: tuple[int, int]
    ) -> None:
        size = (f"trainer.nnodes={nodes}", f"trainer.n_gpus_per_node={gpus}")

        pools, placement = self.pools("python3", "main_ppo_split.py", *size)

        assert pools == [("actor", *half), ("critic", *half)]
        assert placement == {
            "actor": "actor",
            "rollout": ["actor"],
            "ref": ["actor"],
            "critic": "critic",
            "reward": ["critic"],
        }

    def test_nodes_that_a_split_leaves_over_are_reported(self) -> None:
        conversion = convert(read_arguments(["python3", "main_ppo_split.py", *SAID, "trainer.nnodes=3"]))

        assert "leaves one idle" in unconverted(conversion)["trainer.nnodes"]

    def test_a_split_of_one_gpu_is_refused(self) -> None:
        conversion = convert(read_arguments(["python3", "main_ppo_split.py", *SAID, "trainer.n_gpus_per_node=1"]))

        assert "two GPUs or more" in unconverted(conversion)["trainer.n_gpus_per_node"]
        assert not conversion.is_valid

    def test_one_step_off_policy_has_gpus_of_the_rollouts_own(self) -> None:
        size = ("trainer.n_gpus_per_node=2", "rollout.nnodes=1", "rollout.n_gpus_per_node=6")

        pools, placement = self.pools("python3", "-m", "verl.experimental.one_step_off_policy.main_ppo", *size)

        assert pools == [("gpus", 1, 2), ("rollout", 1, 6)]
        assert placement == {"actor": "gpus", "rollout": ["rollout"]}

    def test_one_step_off_policy_is_one_step_off(self) -> None:
        words = ["python3", "-m", "verl.experimental.one_step_off_policy.main_ppo", *SAID]

        plain = convert(read_arguments(words))
        corrected = convert(read_arguments([*words, "algorithm.rollout_correction.rollout_is=token"]))

        assert plain.is_valid
        assert set(unconverted(plain)) == {"--config-name"}
        assert value_at(plain, "schedule") == {"mode": "OneStepOff", "maxStaleness": 1}
        assert value_at(plain, "algorithm.rolloutCorrection") == {"method": "None"}
        found = {"method": "Truncate", "level": "Token", "upper": 2.0}
        assert value_at(corrected, "algorithm.rolloutCorrection") == found
        assert [pool["name"] for pool in value_at(plain, "pools")] == ["gpus", "rollout"]

    @pytest.mark.parametrize(
        ("threshold", "bounds"),
        [("3.0", {"method": "Truncate", "upper": 3.0}), ("0.5_5.0", {"method": "Mask", "lower": 0.5, "upper": 5.0})],
    )
    def test_importance_weights_of_the_rollout_keep_their_bounds(
        self, threshold: str, bounds: dict[str, object]
    ) -> None:
        where = "algorithm.rollout_correction"
        words = [f"{where}.rollout_is=sequence", f"{where}.rollout_is_threshold={threshold}"]

        conversion = convert(read_arguments(["python3", "-m", "verl.trainer.main_ppo", *SAID, *words]))

        assert conversion.unconverted == []
        assert value_at(conversion, "algorithm.rolloutCorrection") == {"level": "Sequence", **bounds}

    def test_rejected_responses_have_no_counterpart(self) -> None:
        word = "algorithm.rollout_correction.rollout_rs=token_k1"

        conversion = convert(read_arguments(["python3", "-m", "verl.trainer.main_ppo", *SAID, word]))

        assert "responses are not rejected" in unconverted(conversion)["algorithm.rollout_correction.rollout_rs"]

    def test_a_reward_model_may_have_separate_gpus(self) -> None:
        words = ("enable=True", "enable_resource_pool=True", "nnodes=1", "n_gpus_per_node=4")

        pools, placement = self.pools(*(f"reward_model.{word}" for word in words))

        assert pools == [("gpus", 1, 8), ("reward", 1, 4)]
        assert placement == {"actor": "gpus", "reward": ["reward"]}


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("my_project.train", "only its settings were read, not its code"),
    ],
)
def test_another_program_than_main_ppo_is_reported(program: str, why: str) -> None:
    conversion = convert(read_arguments(["python3", "-m", program, *SAID]))

    assert why in unconverted(conversion)[program]


class TestConfigurationFiles:
    WORDS = ("python3", "-m", "verl.trainer.main_ppo", *SAID)

    def converted(self, folder: Path, *words: str) -> Conversion:
        (folder / "run.sh").write_text(" ".join([*self.WORDS, *words]))
        return convert(read([str(folder / "run.sh")], Options(runs=False)))

    def test_one_beside_the_script_is_read(self, tmp_path: Path) -> None:
        (tmp_path / "config").mkdir()
        text = "{defaults: [ppo_trainer, _self_], data: {train_batch_size: 512, max_prompt_length: 100}, hydra: {a: 1}}"
        (tmp_path / "config" / "mine.yaml").write_text(text)

        conversion = self.converted(tmp_path, "--config-name=mine", "data.max_prompt_length=200")

        assert conversion.unconverted == []
        assert value_at(conversion, "data.trainBatchSize") == 512
        assert value_at(conversion, "data.maxPromptLength") == 200, "the command line wins"

    def test_its_folder_may_be_named(self, tmp_path: Path) -> None:
        (tmp_path / "elsewhere").mkdir()
        (tmp_path / "elsewhere" / "mine.yaml").write_text("{data: {train_batch_size: 64}}")

        conversion = self.converted(tmp_path, "--config-path=$PWD/elsewhere", "--config-name", "mine.yaml")

        assert value_at(conversion, "data.trainBatchSize") == 64

    def test_one_that_is_not_there_is_reported_with_the_remedy(self, tmp_path: Path) -> None:
        conversion = self.converted(tmp_path, "--config-name=mine")

        assert "--cfg job --resolve" in unconverted(conversion)["--config-name"]

    def test_defaults_that_are_not_known_are_reported(self, tmp_path: Path) -> None:
        (tmp_path / "mine.yaml").write_text("{defaults: [ppo_trainer, other@data], data: {train_batch_size: 64}}")

        assert "--config-name mine" in unconverted(self.converted(tmp_path, "--config-name=mine"))

    def test_verls_megatron_configuration_is_known(self, tmp_path: Path) -> None:
        conversion = self.converted(tmp_path, "--config-path=config", "--config-name='ppo_megatron_trainer.yaml'")

        assert set(unconverted(conversion)) == {"actor_rollout_ref.actor.strategy", "critic.strategy"}
