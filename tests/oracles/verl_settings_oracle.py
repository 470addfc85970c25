"""verl's configurations with overrides. Arguments: OVERRIDES ANSWERS (JSON). Imports nothing of ours.

OVERRIDES has those of each program, by its module. Answers with the whole configuration of each, and with the fields of
the critic's dataclass, to which a name can be added.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from pathlib import Path

os.environ["VERL_USE_EXTERNAL_PLUGINS"] = "none"

import verl
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.workers.config import FSDPCriticConfig

# What the programs' own `hydra.main` names.
CONFIGS = {
    "verl.trainer.main_ppo": ("trainer/config", "ppo_trainer"),
    "verl.experimental.one_step_off_policy.main_ppo": (
        "experimental/one_step_off_policy/config",
        "one_step_off_ppo_trainer",
    ),
}


def main(given: str, answered: str) -> None:
    configs = {}
    for module, overrides in json.loads(Path(given).read_text(encoding="utf-8")).items():
        folder, name = CONFIGS[module]
        with initialize_config_dir(str(Path(verl.__file__).parent / folder), version_base=None):
            configs[module] = OmegaConf.to_container(compose(name, overrides), resolve=True)
    fields = [field.name for field in dataclasses.fields(FSDPCriticConfig)]
    answers = {"configs": configs, "critic": fields}
    Path(answered).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
