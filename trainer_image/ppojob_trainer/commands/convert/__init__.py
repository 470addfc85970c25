"""`ppojob convert`: from a verl PPO command line, script or YAML to a PPOJob.

`read` finds the settings; `scripts` evaluates a script with bash, and `config_files` reads the files that a launch
names. `table` converts single settings, `draft` those that depend on several. `conversion` builds the PPOJob, and
`listing` shows the settings that need attention.
"""

from ppojob_trainer.commands.convert.conversion import Conversion, Target, convert
from ppojob_trainer.commands.convert.read import Options, Settings, read, read_arguments, variables_of

__all__ = ["Conversion", "Options", "Settings", "Target", "convert", "read", "read_arguments", "variables_of"]
