"""The command line: `python -m tools.cluster COMMAND`. The Makefile and people call it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from tools.cluster import cluster, kueue, kwok
from tools.cluster.command import end_programs_on_sigterm
from tools.cluster.demo.run import ImageNames
from tools.cluster.demo.run import run as run_demo
from tools.cluster.demo.target import choose
from tools.cluster.images import build as images
from tools.cluster.images.prune import prune as remove_unused
from tools.cluster.layout import Layout
from tools.cluster.offline import parts as offline
from tools.cluster.processes import Processes
from tools.cluster.stages import Stages, exit_status

app = typer.Typer(help="A real one-node Kubernetes with KubeRay.", no_args_is_help=True, add_completion=False)


@app.command()
def build(names: Annotated[list[str] | None, typer.Argument(help="Names of Go modules. Default: all.")] = None) -> None:
    """Build the binaries whose Go module has changed."""
    stages = Stages()
    cluster.build(Layout.from_environment(), stages, names or [])
    if not names:
        stages.print_table()


@app.command()
def up() -> None:
    """Start the cluster, if it does not run, and print the exports for a shell."""
    layout, stages = Layout.from_environment(), Stages()
    with cluster.locked(layout):
        cluster.up(layout, stages)
    stages.print_table()
    env()


@app.command()
def down(purge: Annotated[bool, typer.Option(help="Remove the cached images too.")] = False) -> None:
    """Stop the cluster, and remove everything that it left on the machine, also its storage."""
    layout, stages = Layout.from_environment(), Stages()
    with cluster.locked(layout):
        cluster.down(layout, stages, purge=purge)
    stages.print_table()


@app.command()
def status() -> None:
    """Show which processes run, and whether the cluster is healthy. Exit with 1 if it is not."""
    layout = Layout.from_environment()
    processes = Processes(layout)
    for name in (*cluster.CORE, *cluster.SATELLITES, kwok.PROCESS):
        record = processes.record(name)
        state = f"runs, process {record.pid}" if record and record.is_alive() else "does not run"
        print(f"{name:24} {state:24} {layout.log(name)}")
    is_healthy = cluster.is_healthy(layout)
    print("healthy" if is_healthy else "not healthy")
    raise typer.Exit(0 if is_healthy else 1)


@app.command()
def env() -> None:
    """Print the exports with which a shell uses the cluster."""
    layout = Layout.from_environment()
    print(f'export PATH="{layout.bin}:$PATH"')
    print(f'export KUBECONFIG="{layout.kubeconfig}"')


@app.command()
def image(
    names: Annotated[list[str], typer.Argument(help="operator, trainer, or both.")],
    fetch: Annotated[bool, typer.Option(help="Let the node pull the images now.")] = True,
) -> None:
    """Build images of the working tree, push them to the cluster's registry, and print their names."""
    layout, stages = Layout.from_environment(), Stages()
    built = [images.ensure_in_cluster(layout, stages, name, fetch=fetch) for name in names]
    print("\n".join(item.name for item in built))


@app.command()
def prune() -> None:
    """Remove images that neither the working tree nor a pod uses."""
    stages = Stages()
    with stages.stage("remove unused images") as stage:
        stage.note = ", ".join(remove_unused(Layout.from_environment())) or "none"


@app.command()
def demo(
    image: Annotated[str, typer.Option(envvar="IMAGE", help="The trainer's image, for your own cluster.")] = "",
    operator_image: Annotated[
        str, typer.Option(envvar="OPERATOR_IMAGE", help="The operator's image, for your own cluster.")
    ] = "",
    limit: Annotated[int, typer.Option(min=60, help="Seconds that the training may take.")] = 2400,
) -> None:
    """Train a model on the one-node cluster, or on your own with KUBECONFIG, IMAGE and OPERATOR_IMAGE."""
    layout, stages = Layout.from_environment(), Stages()
    target = choose(layout, trainer_image=image, operator_image=operator_image)
    names = None if target.is_ours else ImageNames(trainer=image, operator=operator_image)
    if target.is_ours and os.environ.get("KUBECONFIG", str(layout.kubeconfig)) != str(layout.kubeconfig):
        stages.console.print("KUBECONFIG is left alone: without IMAGE and OPERATOR_IMAGE the one-node cluster is used")
    try:
        run_demo(layout, target, names, limit=limit, stages=stages)
    finally:
        stages.print_table()
    if target.is_ours:
        env()


@app.command("kwok")
def kwok_nodes(
    count: Annotated[int, typer.Argument(min=1, max=1000, help="Number of nodes.")],
    prefix: Annotated[str, typer.Option(help="Prefix of the nodes' names.")] = "fake",
    label: Annotated[list[str] | None, typer.Option(help="Label of the nodes, as KEY=VALUE. Repeatable.")] = None,
    gpus: Annotated[int, typer.Option(min=0, help="GPUs of each node.")] = 8,
) -> None:
    """Add nodes that exist only in the API server, with labels and GPUs."""
    labels = dict(item.split("=", 1) for item in label or [])
    print("\n".join(kwok.add_nodes(Layout.from_environment(), count, prefix=prefix, labels=labels, gpus=gpus)))


@app.command("kueue")
def kueue_queues(
    remove: Annotated[bool, typer.Option("--remove", help="Remove Kueue.")] = False,
) -> None:
    """Install Kueue, which queues RayClusters. The first call builds it, which takes about four minutes."""
    layout, stages = Layout.from_environment(), Stages()
    with stages.stage("remove Kueue" if remove else "install Kueue"):
        kueue.remove(layout) if remove else kueue.install(layout)


@app.command()
def pack(
    output: Annotated[Path, typer.Argument(help="Folder for the parts.")],
    python_version: Annotated[
        str, typer.Option(help="Version of the other machine's Python. Empty: it already has the operator's packages.")
    ] = "3.12",
    quick: Annotated[
        bool,
        typer.Option(help="Compress by gzip instead of xz: takes seconds instead of minutes, and doubles the size."),
    ] = False,
    programs: Annotated[
        bool,
        typer.Option(
            help="Pack the programs. --no-programs packs only the sources, and keeps the programs' existing parts."
        ),
    ] = True,
) -> None:
    """Pack the cluster for a machine without a network, in parts of at most 59 MB."""
    stages = Stages()
    offline.pack(Layout.from_environment(), output, offline.Options(python_version, quick, programs), stages)
    stages.print_table()
    print(f"{output / 'unpack.sh'} joins the parts: unpack.sh DIR, then DIR/ppojob-cluster/start.sh --help")


if __name__ == "__main__":
    end_programs_on_sigterm()
    sys.exit(exit_status(app))
