"""The command line on the machine without a network, behind `start.sh`: start the cluster, compare, take it down."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cluster import cluster
from tools.cluster.layout import PROJECT
from tools.cluster.offline import comparison, start
from tools.cluster.offline.machine import Machine
from tools.cluster.stages import Stages, exit_status

# start.sh lies in the pack's folder, the project beside it.
PACK = PROJECT.parent
app = typer.Typer(help="The one-node cluster on a machine without a network.", no_args_is_help=True)


@app.command()
def compare(
    site: Annotated[
        Path | None, typer.Option(resolve_path=True, help="Packages of the trainer that the interpreter does not have.")
    ] = None,
    devices: Annotated[
        Path, typer.Option(resolve_path=True, help="Where the device nodes nvidia0, nvidia1, ... lie.")
    ] = Path("/dev"),
    shape: Annotated[str, typer.Option(help="The workload's model: 0.5B, 1.5B or tiny.")] = "0.5B",
    device: Annotated[str, typer.Option(help="CUDA or CPU.")] = "CUDA",
    steps: Annotated[int, typer.Option(min=5, help="Steps of each run.")] = 10,
    limit: Annotated[int, typer.Option(min=30, help="Seconds that each of the two runs may take.")] = 300,
) -> None:
    """Start the cluster, run workload W in it and outside, print the two step times; the cluster stays."""
    machine = Machine(PACK, site, devices)
    machine.output.mkdir(exist_ok=True)
    stages = Stages()
    try:
        start.up(machine, stages)
        comparison.compare(machine, comparison.Work(shape, device, steps, limit), stages)
    finally:
        stages.print_table()


@app.command()
def down() -> None:
    """End the cluster and remove all that it left on the machine."""
    stages = Stages()
    cluster.down(Machine(PACK, None).layout, stages)
    stages.print_table()


if __name__ == "__main__":
    sys.exit(exit_status(app))
