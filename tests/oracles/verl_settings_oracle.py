"""verl's configuration with overrides. Arguments: OVERRIDES ANSWERS (JSON). Imports nothing of ours.

Answers with the whole configuration, and with the fields of the critic's dataclass, to which a name can be added.
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


def main(given: str, answered: str) -> None:
    overrides = json.loads(Path(given).read_text(encoding="utf-8"))
    folder = Path(verl.__file__).parent / "trainer" / "config"
    with initialize_config_dir(str(folder), version_base=None):
        config = compose("ppo_trainer", overrides)
    fields = [field.name for field in dataclasses.fields(FSDPCriticConfig)]
    answers = {"config": OmegaConf.to_container(config, resolve=True), "critic": fields}
    Path(answered).write_text(json.dumps(answers), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
