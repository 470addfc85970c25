"""Stages: each prints what it does and how long it took; a table sums them up at the end.

Called by the commands. A failing stage prints its name, the reason and the log, and ends the command.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape

from tools.cluster.errors import ClusterError


@dataclass
class Stage:
    """One step: `note` says in a few words what came of it (reused, built, 3 pods ...)."""

    name: str
    note: str = ""
    seconds: float = 0.0
    is_failed: bool = False


class StageFailed(RuntimeError):
    """A stage failed and has been reported; the command ends with a failure."""


def exit_status(app: Callable[[], object]) -> int:
    """Run a command line; return 1, with one message and no traceback, for what the parts refuse."""
    try:
        app()
    except StageFailed:
        return 1
    except ClusterError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


@dataclass
class Stages:
    """The stages of one command, in order."""

    console: Console = field(default_factory=lambda: Console(highlight=False, soft_wrap=True))
    stages: list[Stage] = field(default_factory=list)

    @contextmanager
    def stage(self, name: str) -> Iterator[Stage]:
        """Run the body as the stage `name`.

        Raises:
            StageFailed: the body raised ClusterError; the reason is printed already.
        """
        stage = Stage(name)
        self.stages.append(stage)
        self.console.print(f"[bold]>[/] {escape(name)}")
        start = time.monotonic()
        try:
            yield stage
        except ClusterError as error:
            stage.is_failed = True
            self.console.print(f"[bold red]FAILED[/] {escape(name)}: {escape(str(error))}")
            raise StageFailed(name) from error
        finally:
            stage.seconds = time.monotonic() - start
        note = f" ({stage.note})" if stage.note else ""
        self.console.print(f"  done in {stage.seconds:.1f} s{escape(note)}")

    def print_table(self) -> None:
        """Print every stage with its result, seconds and note, one a line.

        Without rich's table, which cuts notes: they have names of images and paths that a reader copies.
        """
        width = max((len(stage.name) for stage in self.stages), default=0)
        self.console.print(f"[bold]{'stage':{width}}  result  seconds  note[/]")
        for stage in self.stages:
            result = "[red]failed[/]" if stage.is_failed else "[green]ok[/]    "
            line = f"{escape(f'{stage.name:{width}}')}  {result}  {stage.seconds:7.1f}  {escape(stage.note)}"
            self.console.print(line.rstrip())
