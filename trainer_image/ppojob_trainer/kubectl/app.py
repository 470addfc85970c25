"""The program `kubectl-ppo`, run by kubectl as `kubectl ppo`: shows and controls PPOJobs, and fetches their results.

Slow packages are imported by the commands that need them. All commands except `suspend`, `resume`, `checkpoint` and
`retry` only read. If a job has no pod, a pod is created that reads its storage (see run_folder.py).
"""

import json
import os
import shlex
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.live import Live

from ppojob_api.v1alpha1.constants import PLURAL
from ppojob_trainer.kubectl import checkpoint_request, pending, retry_request, status_table, waiting
from ppojob_trainer.kubectl.client import Cluster, Kubectl, KubectlError, NotThereError, Raw

if TYPE_CHECKING:
    from ppojob_trainer.kubectl.run_folder import RunFolder

app = typer.Typer(
    name="kubectl ppo",
    help="Show and control PPOJobs: status, logs, metrics, plots, trained models, and why a job waits.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_WIDE = 300
"""Columns of a line where no person reads."""
_KIND = f"{PLURAL}.ppojob.dev"
_SELECTOR = "ppojob.dev/job"
_SHOWN_METRICS = ("critic/score/mean", "actor/ppo_kl", "response_length/mean", "timing_s/step", "perf/throughput")

Name = Annotated[str, typer.Argument(help="Name of the PPOJob.", show_default=False)]
Namespace = Annotated[
    str | None, typer.Option("--namespace", "-n", help="Namespace.", show_default="that of the kubeconfig's context")
]
Wait = Annotated[int, typer.Option(min=0, help="Seconds to wait until it is done.", show_default=False)]
Context = Annotated[
    str | None, typer.Option("--context", help="Context of the kubeconfig.", show_default="the current context")
]


@app.command()
def status(
    name: Annotated[
        str | None, typer.Argument(help="PPOJob to show in full.", show_default="all jobs, one line each")
    ] = None,
    namespace: Namespace = None,
    context: Context = None,
    all_namespaces: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Jobs of all namespaces.")] = False,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Continue until all jobs have ended, or Ctrl-C.")
    ] = False,
    interval: Annotated[float, typer.Option(min=0.5, help="Seconds between updates, with --watch.")] = 2.0,
) -> None:
    """Show one job in full, or all jobs in a table; with --watch, the table is updated."""
    with _refusals():
        cluster = _cluster(context, namespace)
        console = _console()
        if watch:
            _watch(cluster, name, all_namespaces, interval, console)
        else:
            jobs = _jobs(cluster, name, all_namespaces)
            console.print(_view(jobs, name, all_namespaces))


@app.command()
def logs(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    role: Annotated[
        str, typer.Option(help="Whose log: driver, or a role such as actor, rollout, ref, critic, reward.")
    ] = "driver",
    rank: Annotated[int | None, typer.Option(min=0, help="One process of the role.", show_default="all")] = None,
    attempt: Annotated[int | None, typer.Option(min=0, help="Which attempt.", show_default="the last one")] = None,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Follow the log until Ctrl-C.")] = False,
    tail: Annotated[int, typer.Option(min=1, help="Lines of each log.")] = 100,
) -> None:
    """Print the log of the driver, or of a role's processes; also after the job has ended."""
    with _refusals(), _folder(_cluster(context, namespace), name) as (job, folder):
        number = job.get("status", {}).get("attempt", 0) if attempt is None else attempt
        if code := folder.tail(folder.log_pattern(role, rank, number), lines=tail, follow=follow):
            raise typer.Exit(code)


@app.command()
def metrics(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    steps: Annotated[int, typer.Option(min=0, help="Show this many last steps, from the run's metrics.jsonl.")] = 0,
    metric: Annotated[
        list[str] | None,
        typer.Option(
            "--metric", help="A metric to show with --steps; repeatable.", show_default="five of the most used"
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", help="File to which the whole metrics.jsonl is written.", show_default=False),
    ] = None,
) -> None:
    """Show the metrics of the last step (from the status) or of several steps, or fetch all metrics."""
    from ppojob_trainer.telemetry import read_metrics

    with _refusals():
        cluster, console = _cluster(context, namespace), _console()
        if not steps and output is None:
            console.print(status_table.metrics_table(_job(cluster, name)))
            return
        with _folder(cluster, name) as (_, folder), tempfile.TemporaryDirectory() as aside:
            file = output or Path(aside) / "metrics.jsonl"
            file.write_bytes(folder.read(folder.files.metrics))
            if steps:
                console.print(status_table.steps_table(read_metrics(file)[-steps:], metric or _SHOWN_METRICS))
            if output is not None:
                typer.echo(output)


@app.command()
def plot(
    names: Annotated[list[str], typer.Argument(help="PPOJobs; several are compared.", show_default=False)],
    namespace: Namespace = None,
    context: Context = None,
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Picture to write.", show_default="plot.png or timing.png")
    ] = None,
    timing: Annotated[bool, typer.Option("--timing", help="Draw where a step's time goes.")] = False,
) -> None:
    """Draw the metrics of jobs, as `ppojob plot` does; also after they have ended."""
    from ppojob_trainer.telemetry.plot import plot as draw
    from ppojob_trainer.telemetry.timing_plot import plot_timing

    with _refusals(), tempfile.TemporaryDirectory() as aside:
        cluster = _cluster(context, namespace)
        folders = [_fetch(cluster, name, Path(aside) / name, with_timing=timing) for name in names]
        if timing:
            typer.echo(plot_timing(folders, output or Path("timing.png"), names))
        else:
            typer.echo(draw(folders, output or Path("plot.png"), names))


@app.command()
def model(
    name: Name,
    output: Annotated[
        Path, typer.Option("--output", "-o", help="New or empty folder for the model.", show_default=False)
    ],
    namespace: Namespace = None,
    context: Context = None,
    step: Annotated[
        int | None,
        typer.Option(min=1, help="Step of the export, with checkpoint.export: Each.", show_default="the newest"),
    ] = None,
) -> None:
    """Copy the trained model to this machine, as a HuggingFace folder, and print how to serve it."""
    from ppojob_trainer.kubectl import model_files
    from ppojob_trainer.kubectl.run_folder import LONG_READER_SECONDS, open_folder

    with _refusals():
        cluster, target = _cluster(context, namespace), output.expanduser().absolute()
        model_files.refuse_used(target)
        job = _job(cluster, name)
        source = model_files.exported_folder(job, step)
        with open_folder(cluster, job, LONG_READER_SECONDS) as folder, model_files.transfer(str(source)) as on_progress:
            size = model_files.fetch(folder, source, target, on_progress)
        typer.echo(f"{target}: {size:,} bytes, from {source}\nvllm serve {shlex.quote(str(target))}")


@app.command("explain-pending")
def explain_pending(name: Name, namespace: Namespace = None, context: Context = None) -> None:
    """Explain why a job waits, pool by pool, in the words of the scheduler, the kubelet and KubeRay."""
    with _refusals():
        cluster = _cluster(context, namespace)
        job = _job(cluster, name)
        within, selector = f"--namespace={job['metadata']['namespace']}", f"--selector={_SELECTOR}={name}"
        snapshot = pending.JobSnapshot(
            job,
            clusters=cluster.get("rayclusters.ray.io", within, selector)["items"],
            pods=cluster.get("pods", within, selector)["items"],
            events=cluster.get("events", within, "--field-selector=type=Warning")["items"],
            now=datetime.now(UTC),
        )
        # Not printed with rich, which would wrap the scheduler's sentences at the terminal's width.
        typer.echo("\n".join(pending.explain(snapshot)))


@app.command()
def dashboard(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    port: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=65535,
            help="Port of this machine.",
            show_default="8265, TensorBoard's 6006",
        ),
    ] = None,
    tensorboard: Annotated[
        bool,
        typer.Option(
            "--tensorboard", help="Forward TensorBoard instead of Ray's dashboard, also after the job has ended."
        ),
    ] = False,
) -> None:
    """Forward Ray's dashboard, or TensorBoard, to this machine, until Ctrl-C."""
    from ppojob_trainer.kubectl import port_forward

    forward = port_forward.tensorboard if tensorboard else port_forward.dashboard
    with _refusals():
        cluster = _cluster(context, namespace)
        if code := forward(cluster, _job(cluster, name), port):
            raise typer.Exit(code)


@app.command()
def wait(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    timeout: Annotated[int, typer.Option(min=0, help="Seconds to wait.")] = 86_400,
) -> None:
    """Wait until a job has ended, and print how it ended. Exit with 0 if it is complete, else with 1."""
    with _refusals():
        cluster = _cluster(context, namespace)
        job = waiting.wait_until_finished(cluster, _KIND, _job(cluster, name), timeout)
        sentence, is_complete = waiting.verdict(job)
        typer.echo(sentence)
        if not is_complete:
            raise typer.Exit(1)


@app.command()
def suspend(name: Name, namespace: Namespace = None, context: Context = None, wait: Wait = 0) -> None:
    """Suspend a job: save a checkpoint, stop, and release its GPUs."""
    with _refusals():
        _set_suspend(_cluster(context, namespace), name, True, wait)


@app.command()
def resume(name: Name, namespace: Namespace = None, context: Context = None, wait: Wait = 0) -> None:
    """Resume a suspended job from its last checkpoint."""
    with _refusals():
        _set_suspend(_cluster(context, namespace), name, False, wait)


@app.command()
def checkpoint(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    timeout: Annotated[int, typer.Option(min=0, help="Seconds to wait for it; 0: do not wait.")] = 600,
) -> None:
    """Request a checkpoint of a running job, wait until it is saved, and print its step. The job keeps running."""
    with _refusals():
        cluster = _cluster(context, namespace)
        request = checkpoint_request.ask(cluster, _KIND, _job(cluster, name), datetime.now(UTC))
        typer.echo(f"{request.key}: requested a checkpoint; step {request.step} is done")
        if timeout:
            typer.echo(checkpoint_request.await_answer(cluster, _KIND, request, timeout))


@app.command()
def retry(
    name: Name,
    namespace: Namespace = None,
    context: Context = None,
    timeout: Annotated[int, typer.Option(min=1, help="Seconds to wait for the operator's answer.")] = 60,
) -> None:
    """Run a failed job, or a complete job with more steps, again from its last checkpoint."""
    with _refusals():
        cluster = _cluster(context, namespace)
        typer.echo(retry_request.run_again(cluster, _KIND, _job(cluster, name), datetime.now(UTC), timeout))


def main() -> None:
    """Run the program."""
    app()


def _set_suspend(cluster: Cluster, name: str, wanted: bool, wait: int) -> None:
    """Write spec.runPolicy.suspend; with `wait` come back when the job has followed it, or after so many seconds."""
    patch = json.dumps({"spec": {"runPolicy": {"suspend": wanted}}})
    patched = json.loads(cluster.output("patch", _KIND, name, "--type=merge", f"--patch={patch}", "--output=json"))
    if patched["spec"].get("runPolicy", {}).get("suspend") is not wanted:
        raise KubectlError("the cluster's definition of PPOJob has no spec.runPolicy.suspend: upgrade its CRD")
    within = f"--namespace={patched['metadata']['namespace']}"
    typer.echo(f"{patched['metadata']['namespace']}/{name}: spec.runPolicy.suspend is {str(wanted).lower()}")
    condition = f"--for=condition=Suspended={str(wanted).lower()}"
    if wait and (code := cluster.attach("wait", within, f"{_KIND}/{name}", condition, f"--timeout={wait}s")):
        raise typer.Exit(code)


def _console() -> Console:
    """Return a console that cuts nothing where no person reads: a table in a file or a pipe is as wide as it needs."""
    console = Console(highlight=False)
    return console if console.is_terminal or "COLUMNS" in os.environ else Console(highlight=False, width=_WIDE)


def _cluster(context: str | None, namespace: str | None) -> Cluster:
    return Kubectl(context=context, namespace=namespace)


def _job(cluster: Cluster, name: str) -> Raw:
    job: Raw = cluster.get(_KIND, name)
    return job


def _jobs(cluster: Cluster, name: str | None, all_namespaces: bool) -> list[Raw]:
    if name is not None:
        return [_job(cluster, name)]
    jobs: list[Raw] = cluster.get(_KIND, *(["--all-namespaces"] if all_namespaces else []))["items"]
    return jobs


def _view(jobs: Sequence[Raw], name: str | None, all_namespaces: bool) -> object:
    now = datetime.now(UTC)
    if name is not None:
        return status_table.job_view(jobs[0], now)
    return status_table.jobs_table(jobs, now, with_namespace=all_namespaces) if jobs else "no PPOJobs found"


def _watch(cluster: Cluster, name: str | None, all_namespaces: bool, interval: float, console: Console) -> None:
    """Show the jobs until all are finished: a live table on a terminal, a line for each change elsewhere."""
    shown: dict[str, str] = {}
    with Live(console=console, auto_refresh=False, transient=False) as live:
        while True:
            jobs = _jobs(cluster, name, all_namespaces)
            if console.is_terminal:
                live.update(_view(jobs, name, all_namespaces), refresh=True)  # type: ignore[arg-type]
            else:
                _print_changes(jobs, shown)
            if all(map(status_table.is_finished, jobs)):
                return
            time.sleep(interval)


def _print_changes(jobs: Sequence[Raw], shown: dict[str, str]) -> None:
    for job in jobs:
        line, uid = status_table.line(job), job["metadata"]["uid"]
        if shown.get(uid) != line:
            typer.echo(line)
            shown[uid] = line


@contextmanager
def _folder(cluster: Cluster, name: str) -> Iterator[tuple[Raw, "RunFolder"]]:
    from ppojob_trainer.kubectl.run_folder import open_folder

    job = _job(cluster, name)
    with open_folder(cluster, job) as folder:
        yield job, folder


def _fetch(cluster: Cluster, name: str, target: Path, *, with_timing: bool) -> Path:
    """Bring what a picture is drawn from into a folder of this machine."""
    target.mkdir()
    with _folder(cluster, name) as (_, folder):

        def bring(file: Path) -> None:
            (target / file.name).write_bytes(folder.read(file))

        bring(folder.files.metrics)
        if with_timing:
            bring(folder.files.trace)
            # There is no recommendation for the layout in the first steps.
            with suppress(NotThereError):
                bring(folder.files.recommendation)
    return target


@contextmanager
def _refusals() -> Iterator[None]:
    """Print errors that a user can fix as a sentence, and exit with 1; a bug of ours keeps its traceback."""
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    except (KubectlError, NotThereError, ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


if __name__ == "__main__":
    main()
