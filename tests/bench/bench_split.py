"""Measures workload W in several placements and schedules, one after the other on this machine, and prints ratios.

    python -m tests.bench.bench_split --output DIR [--gpus 4] [--shape 0.5B] [--layouts 1+1,2+1] [--engine-alone]
        [--prompts N] [--prompt-tokens N] [--response-tokens N] [--contrast FACTOR] [--no-save] [--verl [PYTHON]]

Every layout (`layouts` has their names) is a real `ppojob run` in processes of its own. The figures are medians over
the steps after the warm-up. With --verl the peer verl does the same work on the same GPUs afterwards, and stands beside
them; without a critic, also with its own one-step-off schedule. After them comes what the cost model predicts from each
layout for every other one. Run again with the same output, it goes on: runs of the same jobs are read, not repeated.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from tests.bench import predictions, report, workload
from tests.bench.generation import measure_alone
from tests.bench.layouts import Layout, layout, layouts
from tests.bench.measurement import WARM_UP_STEPS, Result, Run, measure, spec_of
from tests.bench.verl_run import NoVerlError, Verl, find, measure_verl
from tests.bench.verl_settings import schedules

_MANY_STEPS = 1_000_000


def main() -> None:
    """Measure, print, and write `results.json`."""
    # What runs is ended by what stands after it.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    arguments = _arguments()
    size = _size(arguments)
    output: Path = arguments.output.absolute()
    data = (arguments.data or output / "workload").absolute()
    data.mkdir(parents=True, exist_ok=True)
    workload.prepare(data, size, arguments.steps)
    console = Console(width=arguments.width)
    results: list[Result] = []
    for name, sections in arguments.layouts.items():
        if workload.needs_reward_model(sections):
            workload.prepare_reward_model(data, size)
        job = _job(data, size, sections, arguments)
        if arguments.no_save:
            results.append(measure(name, _without_end(job), output / name, stop_after=arguments.steps))
        else:
            results.append(measure(name, job, output / name))
        console.print(f"{name}: {results[-1].step_s:.3f} s a step")
    alone = _alone(results, size, output) if arguments.engine_alone else {}
    runs: list[Run] = [*results]
    if arguments.verl is not None:
        spec = spec_of(_job(data, size, layout("colocated", arguments.gpus), arguments))
        for schedule in schedules(spec):
            runs.append(measure_verl(arguments.verl, spec, size, output / schedule.module, schedule))
            console.print(f"{runs[-1].name}: {runs[-1].step_s:.3f} s a step")
    console.print(report.table(runs, size, alone))
    found = predictions.predictions(results)
    console.print(predictions.table(found))
    rows: dict[str, Any] = {
        "layouts": [{"name": r.name, "first_step_s": r.first_step_s, **r.metrics} for r in runs],
        "share_between_phases": {r.name: r.between_phases for r in results},
        "engine_alone_s": alone,
        "predictions": [{**vars(one), "error": one.error} for one in found],
    }
    (output / "results.json").write_text(json.dumps(rows, indent=1), encoding="utf-8")


def _size(arguments: argparse.Namespace) -> workload.Size:
    return replace(workload.size_of(arguments.shape), is_varied=arguments.lengths == "varied", **_changes(arguments))


def _changes(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the given fields of `workload.Size`; none of them are those of workload W."""
    fields = {
        "num_prompts": arguments.prompts,
        "prompt_tokens": arguments.prompt_tokens,
        "response_tokens": arguments.response_tokens,
        "contrast": arguments.contrast,
    }
    return {field: value for field, value in fields.items() if value is not None}


def _job(data: Path, size: workload.Size, sections: Layout, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the job of a layout, as the command line wants it."""
    job = workload.job(data, size, sections, arguments.steps, arguments.device)
    workload.set_fields(job["spec"], arguments.set)
    return job


def _without_end(job: dict[str, Any]) -> dict[str, Any]:
    """Return the job with more steps than are ever trained, so that no last save comes before the run is ended."""
    spec = job["spec"]
    trainer = {**spec["trainer"], "totalSteps": spec["trainer"]["totalSteps"] + _MANY_STEPS}
    return {**job, "spec": {**spec, "trainer": trainer}}


def _found_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--data", type=Path, help="folder for model and prompts (default: in the output)")
    parser.add_argument("--gpus", type=int, help="default: all that are found; 2 processes with --device CPU")
    parser.add_argument("--shape", choices=sorted(workload.SHAPES), default="0.5B")
    parser.add_argument("--lengths", choices=("equal", "varied"), default="equal", help="of the responses")
    parser.add_argument("--prompts", type=int, metavar="N", help="of a step, a multiple of 4 (default: 256; tiny: 8)")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="of each, at least 3 (default: 130; tiny: 16)")
    parser.add_argument("--response-tokens", type=int, metavar="N", help="at most (default: 512; tiny: 16)")
    parser.add_argument("--contrast", type=float, metavar="FACTOR", help="of the output layer's weights (default: 1)")
    parser.add_argument("--layouts", help="comma-separated; default: all that use all GPUs")
    parser.add_argument("--steps", type=int, default=10, help=f"more than the {WARM_UP_STEPS} of the warm-up")
    parser.add_argument("--device", choices=("CUDA", "CPU"), default="CUDA")
    parser.add_argument("--set", action="append", default=[], help="section.field=YAML value, for every layout")
    parser.add_argument(
        "--no-save", action="store_true", help="end each run after its last step, before it saves a checkpoint"
    )
    parser.add_argument("--engine-alone", action="store_true", help="generate with the engine alone too, and compare")
    parser.add_argument(
        "--verl", nargs="?", const=sys.executable, metavar="PYTHON", help="measure verl too, with this interpreter's"
    )
    parser.add_argument("--width", type=int, default=170, help="of the tables, in letters")
    arguments = parser.parse_args()
    if arguments.gpus is None:
        arguments.gpus = _found_gpus() if arguments.device == "CUDA" else 2
        if not arguments.gpus:
            parser.error("--device CUDA: no GPU is found here; take --device CPU --shape tiny to try the benchmark")
    names = arguments.layouts.split(",") if arguments.layouts else list(layouts(arguments.gpus))
    try:
        arguments.layouts = {name: layout(name, arguments.gpus) for name in names}
    except ValueError as error:
        parser.error(f"--layouts {','.join(names)}: {error}")
    if arguments.prompts is not None and (arguments.prompts < 1 or arguments.prompts % workload.NUM_MINIBATCHES):
        parser.error(
            f"--prompts {arguments.prompts}: a step has {workload.NUM_MINIBATCHES} minibatches, so give a multiple"
        )
    if arguments.prompt_tokens is not None and arguments.prompt_tokens <= workload.TEMPLATE_TOKENS:
        parser.error(f"--prompt-tokens {arguments.prompt_tokens}: give more than {workload.TEMPLATE_TOKENS}")
    if arguments.steps <= WARM_UP_STEPS:
        parser.error(f"--steps {arguments.steps}: the first {WARM_UP_STEPS} do not count, so take more")
    if arguments.verl is not None:
        arguments.verl = _verl(parser, arguments)
    return arguments


def _verl(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> Verl:
    """Return verl; end the program where it is not there, or cannot do the work."""
    if arguments.device != "CUDA":
        parser.error("--verl: verl is measured with --device CUDA alone")
    try:
        return find(arguments.verl)
    except NoVerlError as error:
        parser.error(str(error))


def _alone(results: list[Result], size: workload.Size, output: Path) -> dict[int, float]:
    """Return the seconds of the engine alone by the prompts of a replica, each number once."""
    found: dict[int, float] = {}
    for result in results:
        number = report.prompts_of_a_replica(result, size)
        if number not in found:
            job = output / result.name / "job.yaml"
            found[number] = measure_alone(job, number, len(result.steps), output / f"engine-alone-{number}")
    return found


if __name__ == "__main__":
    main()
