"""`ppojob convert`: from a verl PPO command line, script or YAML to a PPOJob.

`read` finds the settings (a script's by `scripts`, which has bash evaluate it; `config_files` has those that a launch
names), `table` says what each becomes and `together` what several become at once, `conversion` puts the PPOJob
together, and `listing` shows the rest.
"""

from ppojob_trainer.commands.convert.conversion import Conversion, Target, convert
from ppojob_trainer.commands.convert.read import Options, Settings, read, read_arguments, variables_of

__all__ = ["Conversion", "Options", "Settings", "Target", "convert", "read", "read_arguments", "variables_of"]
