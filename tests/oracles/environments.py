"""Another project's published functions, called in a separate environment, because its pins conflict with ours.

Called by the tests of this folder. An oracle is two files here: `<name>-requirements.txt`, pinned and complete, and
`<name>_oracle.py`, which reads inputs from one file and writes answers to another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tests.environments import OwnEnvironment, run

HERE = Path(__file__).resolve().parent
ANSWER_LIMIT_SECONDS = 600


@dataclass(frozen=True)
class Oracle:
    """A peer: `verl` or `trl`."""

    name: str

    def answers(self, inputs: Mapping[str, np.ndarray], folder: Path) -> dict[str, np.ndarray]:
        """Give the inputs to the oracle's script; return what it answers.

        Raises:
            EnvironmentFailedError: with the end of its output.
        """
        python = OwnEnvironment("oracles", self.name, HERE / f"{self.name}-requirements.txt").python()
        given, answered = folder / "inputs.npz", folder / "answers.npz"
        np.savez(given, **inputs)
        run([python, HERE / f"{self.name}_oracle.py", given, answered], ANSWER_LIMIT_SECONDS)
        with np.load(answered) as found:
            return dict(found)
