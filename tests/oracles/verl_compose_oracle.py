"""Configurations that Hydra composes for launches of verl. Arguments: LAUNCHES ANSWERS (JSON). Imports nothing of ours.

A launch is {"folder", "name", "overrides", "cwd"}; an answer is the whole configuration, or {"error"}.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


def composed(launch: dict[str, Any]) -> Any:
    os.chdir(launch["cwd"])
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(launch["folder"], version_base=None):
            config = compose(launch["name"], launch["overrides"])
        return OmegaConf.to_container(config, resolve=True)
    except (HydraException, OmegaConfBaseException) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main(given: str, answered: str) -> None:
    launches = json.loads(Path(given).read_text(encoding="utf-8"))
    answers = [composed(launch) for launch in launches]
    Path(answered).write_text(json.dumps(answers, default=str), encoding="utf-8")


if __name__ == "__main__":
    main(*(str(Path(argument).resolve()) for argument in sys.argv[1:]))
