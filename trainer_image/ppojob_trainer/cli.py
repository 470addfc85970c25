"""The program `ppojob`: validate a PPOJob, plan it, run it on this machine, draw its metrics, prepare a model.

Only the commands that need Ray, torch and vLLM import them, so that the others start at once.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ppojob_api.v1alpha1.constants import CONFIG_MOUNT_PATH, JOB_FILE, Reason
from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.spec_warnings import spec_warnings
from ppojob_api.v1alpha1.validation import SpecError
from ppojob_api.v1alpha1.versions import own_version
from ppojob_trainer.commands.describe import describe
from ppojob_trainer.commands.manifest import Manifest, ManifestError, OnlyTemplatesError, load, problems

app = typer.Typer(
    help="Train language models with PPO: the same file on a Kubernetes cluster and on this machine.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)

_INTERRUPTED = 130
_DOES_NOT_FIT = 2
_PLAN_WIDTH = 140
_SET_HELP = "One value of the object, such as trainer.totalSteps=4 or pools.actor.nodes=2; can be given several times."
File = Annotated[Path, typer.Argument(help="YAML file with a PPOJob; - reads standard input.", show_default=False)]
Sets = Annotated[list[str] | None, typer.Option("--set", help=_SET_HELP, show_default=False)]
Templates = Annotated[
    list[Path] | None,
    typer.Option(
        "--template",
        help="YAML file with the template that the job names; not needed if FILE has it. Repeatable.",
        show_default=False,
    ),
]
Gpus = Annotated[
    list[str] | None,
    typer.Option(
        "--gpu",
        metavar="[POOL=]NAME",
        help="Kind of GPU, for all pools or for one: B200, H200, H100, A100 (80 GB) or L40S. Repeatable.",
        show_default="H200",
    ),
]


class PackagedModel(StrEnum):
    """Models that are installed as Python packages."""

    SMOLLM2 = "smollm2"


@app.command()
def validate(file: File, sets: Sets = None, templates: Templates = None) -> None:
    """Check a PPOJob, or a file of templates. Print the resolved settings and warnings, or all errors."""
    with _refusals():
        try:
            manifest = load(file, sets or [], templates=templates or [])
        except OnlyTemplatesError as only:
            typer.echo("\n".join(f"{name}: valid" for name in only.names))
            return
    console = Console(highlight=False)
    console.print(f"{manifest.name}: valid\n")
    console.print(describe(manifest.spec))
    for warning in spec_warnings(manifest.spec):
        console.print(f"warning: {warning}", markup=False, soft_wrap=True)


@app.command()
def run(
    file: File,
    sets: Sets = None,
    templates: Templates = None,
    output: Annotated[
        Path | None, typer.Option(help="Folder of the run.", show_default="output/<name of the job>")
    ] = None,
    storage: Annotated[
        Path | None,
        typer.Option(help="Folder to use as spec.storage.", show_default="`storage` in or beside the run's folder"),
    ] = None,
    attempt: Annotated[
        int | None, typer.Option(min=0, help="Number of the attempt.", show_default="the last one + 1")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would run, and exit.")] = False,
) -> None:
    """Train on this machine's own Ray, without Kubernetes. The same command again resumes from the last checkpoint."""
    from ppojob_trainer.commands.local_run import fetch, job_file, next_attempt

    manifest = _load(file, sets, templates, folder=Path())
    folder = output or Path("output") / manifest.name
    with _refusals():
        job = job_file(manifest, folder, storage)
        number = next_attempt(job.checkpoints) if attempt is None else attempt
    console = Console(highlight=False)
    typer.echo(f"{job.name}, attempt {number}, in {job.root}\n")
    console.print(describe(job.spec))
    if dry_run:
        return
    if job.sources:
        with _refusals():
            fetch(job, typer.echo)
    is_finished = _train(job, number)
    # Not printed with rich, which would cut a long path to the terminal's width.
    typer.echo("\n".join(_results(job)))
    if not is_finished:
        raise typer.Exit(_INTERRUPTED)


@app.command()
def plan(
    file: File,
    sets: Sets = None,
    templates: Templates = None,
    gpus: Gpus = None,
    network: Annotated[
        float | None,
        typer.Option(
            "--network",
            metavar="GB/S",
            help="Bandwidth of the network between hosts for each GPU, in GB per second and direction.",
            show_default="that of the vendor's servers, such as 50",
            min=0.001,
        ),
    ] = None,
    is_json: Annotated[bool, typer.Option("--json", help="Print JSON; sizes are in bytes.")] = False,
    # One parameter with two flags, which may both be given: True is --layouts, and False is --settings.
    others: Annotated[
        list[bool] | None,
        typer.Option(
            "--layouts/--settings",
            metavar="",
            help="--layouts: also plan other sizes of the pools, from half to double. --settings: also plan without "
            "gradient checkpointing, with the largest passes that fit, and without offload. Both can be given.",
            show_default=False,
        ),
    ] = None,
    each_error: Annotated[
        bool, typer.Option("--errors", help="Show the planned number beside each measured one.")
    ] = False,
) -> None:
    """Predict memory, traffic and seconds of a PPOJob, without GPUs and weights. Exit with 2 if it does not fit."""
    # The plan counts no operations, so its warning that Triton is missing would only confuse.
    logging.getLogger("torch.utils.flop_counter").setLevel(logging.ERROR)
    from ppojob_trainer.planning import plan_job
    from ppojob_trainer.planning.gpus import gpus_of_pools
    from ppojob_trainer.planning.layouts import plan_other_sizes
    from ppojob_trainer.planning.measured_once import measured_once
    from ppojob_trainer.planning.report import as_json, as_text
    from ppojob_trainer.planning.settings import plan_other_settings

    spec = _load(file, sets, templates).spec
    with _refusals():
        kinds = gpus_of_pools([pool.name for pool in spec.pools], gpus or [])
        runner = measured_once()
        found = plan_job(spec, kinds, runner=runner)
        sizes = list(plan_other_sizes(spec, kinds, runner=runner)) if True in (others or []) else []
        settings = list(plan_other_settings(found, kinds, runner=runner)) if False in (others or []) else None
        bytes_per_s = None if network is None else network * 1e9
        if is_json:
            typer.echo(as_json(found, sizes, settings, bytes_per_s))
        else:
            # Wide enough for the tables, also in a pipe.
            text = as_text(found, sizes, settings, each_error=each_error, network=bytes_per_s)
            Console(highlight=False, width=_PLAN_WIDTH, markup=False).print(text, soft_wrap=True)
    if not found.fits:
        raise typer.Exit(_DOES_NOT_FIT)


@app.command()
def convert(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="FILE [ARGUMENTS] | -- WORDS",
            help="Launch script and its arguments, or YAML file of verl, or - to read a script from standard input, or "
            "-- and the words of the command line.",
            show_default=False,
        ),
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="File to write.", show_default="standard output")
    ] = None,
    runs: Annotated[
        bool | None,
        typer.Option(
            "--run/--static",
            help="--run: let bash evaluate the script, even if no sandbox works. Programs such as python3 and ray are "
            "recorded, not started. --static: read the script without bash, and refuse branches.",
            show_default="bash in a sandbox, or --static if no sandbox works",
        ),
    ] = None,
    variables: Annotated[
        list[str] | None,
        typer.Option("--env", metavar="NAME=VALUE", help="Variable of the script. Repeatable.", show_default=False),
    ] = None,
    launch: Annotated[
        int | None,
        typer.Option(
            "--launch",
            min=1,
            help="Number of the launch, from 1; required if the script has several.",
            show_default="the only one",
        ),
    ] = None,
    limit: Annotated[float, typer.Option("--limit", min=1, help="Seconds that bash may take.")] = 30.0,
    strict: Annotated[bool, typer.Option("--strict", help="Exit with 1 if anything was not converted.")] = False,
) -> None:
    """Convert a verl PPO command line, script or YAML to a PPOJob. Standard error lists what was not converted."""
    from ppojob_trainer.commands.convert import Options, read, variables_of
    from ppojob_trainer.commands.convert import convert as convert_settings
    from ppojob_trainer.commands.convert.listing import listing

    with _refusals():
        settings = read(words, Options(runs, variables_of(variables or []), launch, limit))
        conversion = convert_settings(settings)
        if output is None:
            typer.echo(conversion.to_yaml(), nl=False)
        else:
            output.write_text(conversion.to_yaml())
    Console(stderr=True, highlight=False).print(listing(conversion, settings.notes))
    if not conversion.is_valid or (strict and conversion.unconverted):
        raise typer.Exit(1)


@app.command()
def plot(
    metrics: Annotated[
        list[Path], typer.Argument(help="metrics.jsonl of each run, or its folder.", show_default=False)
    ],
    output: Annotated[
        Path | None, typer.Option("--output", "-o", help="Picture to write.", show_default="plot.png or timing.png")
    ] = None,
    timing: Annotated[
        bool, typer.Option("--timing", help="Draw where a step's time goes: phases, and what each pool does when.")
    ] = False,
    labels: Annotated[
        list[str] | None,
        typer.Option(
            "--label",
            help="Name of a run in the picture; one for each run, in the same order. Runs with the same name are drawn "
            "as their mean.",
            show_default="its folder",
        ),
    ] = None,
) -> None:
    """Draw reward, KL, response length and time per phase; several runs are compared."""
    from ppojob_trainer.telemetry.plot import plot as draw
    from ppojob_trainer.telemetry.timing_plot import plot_timing

    with _refusals():
        if timing:
            typer.echo(plot_timing(metrics, output or Path("timing.png"), labels or []))
        else:
            typer.echo(draw(metrics, output or Path("plot.png"), labels or []))


@app.command("prepare-model")
def prepare_model(
    output: Annotated[Path, typer.Option(help="Folder to write.", show_default=False)],
    name: Annotated[PackagedModel, typer.Argument(help="Which model.")] = PackagedModel.SMOLLM2,
) -> None:
    """Write a model that is installed as a Python package as a HuggingFace folder, without a download."""
    from ppojob_trainer.models import smollm2

    preparations = {PackagedModel.SMOLLM2: smollm2.prepare}
    with _refusals():
        typer.echo(preparations[name](output))


@app.command(hidden=True)
def hold(
    limit: Annotated[float, typer.Option(min=0, help="Longest wait, in seconds.")],
    job: Annotated[Path, typer.Option(help="The job file.")] = Path(CONFIG_MOUNT_PATH) / JOB_FILE,
    follow: Annotated[bool, typer.Option(help="Wait for a stop, but do not request one.")] = False,
) -> None:
    """Hold a Ray pod that is being deleted until its run has stopped gracefully (the pods' preStop hook)."""
    from ppojob_trainer.commands.hold import follow as follow_others
    from ppojob_trainer.commands.hold import hold as hold_pod

    if not (follow_others if follow else hold_pod)(job, limit):
        typer.echo(f"a run was still active after {limit:g} s: it will resume from its last checkpoint", err=True)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(own_version())


def main() -> None:
    """Run the program."""
    app()


def _load(file: Path, sets: list[str] | None, templates: list[Path] | None, *, folder: Path | None = None) -> Manifest:
    with _refusals():
        return load(file, sets or [], folder=folder, templates=templates or [])


@contextmanager
def _refusals() -> Iterator[None]:
    """Print errors that a user can fix, one per line, and exit with 1; a bug of ours keeps its traceback."""
    try:
        yield
    except (ManifestError, SpecError) as error:
        for line in problems(error):
            typer.echo(line, err=True)
        raise typer.Exit(1) from error
    except typer.Exit:
        # typer.Exit is a RuntimeError too, but its message was already printed.
        raise
    except (OSError, ValueError, RuntimeError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(1) from error


def _train(job: JobFile, attempt: int) -> bool:
    """Run the job and copy the driver's output to its log. Return whether all steps are done.

    Raises:
        typer.Exit: it failed, and the reason was printed.
    """
    from ppojob_trainer.commands.local_run import stop_on_interrupt
    from ppojob_trainer.main import JobFailedError, run_job
    from ppojob_trainer.telemetry import RunFiles, configure_logging, tee_output

    files = RunFiles(Path(job.root))
    log = files.log_of("driver", attempt=attempt)
    with _refusals(), tee_output(log), stop_on_interrupt() as stop:
        configure_logging()
        (files.root / "job.json").write_text(job.encode())
        try:
            outcome = run_job(job, attempt=attempt, stop=stop)
        except JobFailedError as error:
            if error.record.reason == Reason.TRAINER_FAILED:
                # An unexpected error: its message alone does not help, so log the traceback.
                logging.getLogger(__name__).exception("the run failed")
            typer.echo(f"error: {error.record.reason}: {error.record.message}\nlogs: {log.parent}", err=True)
            raise typer.Exit(error.record.exit_code) from error
        if outcome.is_finished:
            typer.echo(f"all {outcome.step} steps are done")
        else:
            typer.echo(f"stopped after step {outcome.step}: the same command resumes from the last checkpoint")
        return outcome.is_finished


def _results(job: JobFile) -> list[str]:
    """Return the paths of the run's files, one per line; files that were not written are left out."""
    from ppojob_trainer.checkpoints.address import is_address
    from ppojob_trainer.telemetry import RunFiles

    files = RunFiles(Path(job.root))
    places: dict[str, str | Path] = {
        "metrics": files.metrics,
        "picture": files.plot,
        "TensorBoard": files.tensorboard,
        "trace": files.trace,
        "samples": files.samples,
        "profiles": files.profiles,
        "logs": files.logs,
        "checkpoints": job.checkpoints,
        "model": files.model,
    }
    return [f"{name:<12} {path}" for name, path in places.items() if is_address(str(path)) or Path(path).exists()]
