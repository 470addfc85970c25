"""`make gpu`: the tests that need GPUs, as many files beside each other as the machine has GPUs for.

The tests of a file that need the same number of GPUs are one process of pytest, which sees that many GPUs. What needs
more GPUs than the machine has is named at the end and does not fail the run.

    python -m tools.suite.gpus                                  # all of tests/gpu
    python -m tools.suite.gpus tests/gpu/test_links_on_cuda.py  # only these files
"""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import pytest

from tools.cluster.layout import PROJECT
from tools.suite.gpu_marks import Needs
from tools.suite.parts import NOT_RUN, PASSED, Part, PartResult, Suite
from tools.suite.signals import end_parts_at_sigterm

T = TypeVar("T")

TESTS = Path("tests") / "gpu"
# In the project.
LOGS = Path(".build") / "gpu"
VISIBLE = "CUDA_VISIBLE_DEVICES"
LIMIT_SECONDS = 7200.0
"""Longest run of a file. Each test has a separate limit, so only a process that hangs outside its tests takes it."""
_SUMMARY = re.compile(r"=+ (\d+ .* in [\d.]+s.*?) =+")


@dataclass(frozen=True)
class GpuPart(Part):
    """The tests of a file that need `num_gpus` GPUs."""

    file: str
    num_gpus: int
    num_tests: int

    @property
    def command(self) -> Sequence[str]:
        only = f"--num-gpus={self.num_gpus}"
        return (sys.executable, "-m", "pytest", self.file, only, "--capture=no", "--durations=5")

    @property
    def title(self) -> str:
        return f"{self.file} on {self.num_gpus} GPU{'s' * (self.num_gpus > 1)}"


@dataclass
class GpuSuite(Suite[GpuPart]):
    """Deals the GPUs: a part starts when as many as it needs are free; a later part may start before it."""

    gpus: Sequence[str] = ()
    """What CUDA_VISIBLE_DEVICES calls them."""
    dealt: dict[GpuPart, list[str]] = field(default_factory=dict)
    """Those of each part that runs or has run."""

    @property
    def at_a_time(self) -> int:
        return max(len(self.gpus), 1)

    def may_run(self, part: GpuPart) -> bool:
        return len(self._free()) >= part.num_gpus

    def reserve(self, part: GpuPart) -> None:
        self.dealt[part] = self._free()[: part.num_gpus]

    def environment(self, part: GpuPart) -> Mapping[str, str]:
        return {VISIBLE: ",".join(self.dealt[part])}

    def details(self, log: str) -> str:
        """Return how many tests passed, failed and were skipped, from pytest's summary; "" without one."""
        found = _SUMMARY.findall(log)
        return re.sub(r", \d+ deselected", "", found[-1]) if found else ""

    def _free(self) -> list[str]:
        taken = {gpu for part in self.running for gpu in self.dealt.get(part, ())}
        return [gpu for gpu in self.gpus if gpu not in taken]


def run(gpus: Sequence[str], parts: Sequence[GpuPart], project: Path = PROJECT) -> int:
    """Run all parts for which there are enough GPUs; return 0 if they passed, else 1."""
    possible = [part for part in parts if part.num_gpus <= len(gpus)]
    suite = GpuSuite(project, list(possible), LOGS, gpus=gpus)
    for log in (project / LOGS).glob("*.log"):
        log.unlink()
    for part in parts:
        if part not in possible:
            needs = f"needs {part.num_gpus} GPUs: {part.num_tests} test{'s' * (part.num_tests > 1)}"
            suite.results.append(PartResult(part.name, NOT_RUN, None, None, needs))
    try:
        suite.run_all()
    finally:
        suite.results += [PartResult(part.name, NOT_RUN, None, None, "the run was ended") for part in suite.waiting]
        suite.print_table()
    ran = [result for result in suite.results if result.result != NOT_RUN]
    return 0 if possible and len(ran) == len(possible) and all(result.result == PASSED for result in ran) else 1


def parts_of(counts: Mapping[tuple[str, int], int]) -> list[GpuPart]:
    """Return the parts in the order of the files, those of fewer GPUs first.

    While a part waits for all GPUs, those that become free would idle: so the parts that fill them come first.
    """
    return [
        GpuPart(f"{_short(file)}-{num_gpus}", LIMIT_SECONDS, file, num_gpus, num_tests)
        for (file, num_gpus), num_tests in sorted(counts.items(), key=lambda entry: entry[0][1])
    ]


def _short(file: str) -> str:
    return Path(file).stem.removeprefix("test_").removesuffix("_on_cuda")


def collect(arguments: Sequence[str]) -> dict[tuple[str, int], int]:
    """Print the versions; return how many tests of each file need how many GPUs.

    Raises:
        ValueError: pytest could not collect them; it has printed why.
    """
    counted = _Counted()
    code = pytest.main([*arguments, "--collect-only", "-qq"], plugins=[counted])
    if code != pytest.ExitCode.OK:
        raise ValueError(f"pytest could not collect {' '.join(arguments)}: {code!r}")
    return dict(counted.counts)


class _Counted:
    """Given to pytest as a plugin: counts the collected tests, and prints the headers that -qq leaves out."""

    def __init__(self) -> None:
        self.counts: Counter[tuple[str, int]] = Counter()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        headers = session.config.hook.pytest_report_header(config=session.config, start_path=session.startpath)
        print(*(line for lines in headers for line in ([lines] if isinstance(lines, str) else lines)), sep="\n")
        for item in session.items:
            self.counts[item.nodeid.split("::")[0], Needs.of(item).num_gpus] += 1


def visible_gpus() -> list[str]:
    """Return the GPUs that this process may use, as CUDA_VISIBLE_DEVICES calls them: by number or UUID."""
    import torch

    num_gpus, given = torch.cuda.device_count(), os.environ.get(VISIBLE)
    # CUDA uses those before the first one that does not exist.
    names = map(str, range(num_gpus)) if given is None else (name.strip() for name in given.split(","))
    return list(names)[:num_gpus]


def in_another_process(function: Callable[..., T], *given: Any) -> T:
    """Return what a function returns in a new process: what the tests import may take memory of a GPU."""
    with get_context("spawn").Pool(1) as pool:
        # Leaving the block ends the process, also if this one is interrupted meanwhile.
        return pool.apply(function, given)


def main(files: Sequence[str]) -> int:
    """Run the files, or all of tests/gpu; return the exit code."""
    if tests := [name for name in files if "::" in name]:
        print(f"{tests[0]} is a test of a file: name files, or run pytest for one test", file=sys.stderr)
        return 1
    gpus = in_another_process(visible_gpus)
    if not gpus:
        print("no GPU is visible, so no test can run", file=sys.stderr)
        return 1
    try:
        counts = in_another_process(collect, list(files) or [str(TESTS)])
    except ValueError as error:
        print(error, file=sys.stderr)
        return 1
    return run(gpus, parts_of(counts))


if __name__ == "__main__":
    end_parts_at_sigterm()
    sys.exit(main(sys.argv[1:]))
