"""Faults of a running job whose critic has its ranks in two pods: what each of them costs, as a table.

Trainer, operator, KubeRay, scheduler and kubelet are real. The table is printed (`--capture=no` shows it). How long a
recovery takes is never asserted. Only the faults of the selected tests are injected, for example those of
`-k "head or drained"`.
"""

import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.conftest import Site
from tests.e2e.faults import (
    ACTOR,
    CRITIC,
    HEAD,
    Injection,
    delete_cluster,
    delete_operator,
    delete_pod,
    drain,
    kill_component,
    pods,
    send_signal,
)
from tests.e2e.small_jobs import FEW_SAMPLES, await_resumption, await_step, records, small_pools
from tools.cluster.command import run
from tools.cluster.waiting import wait_until

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

NAME = "faults"
EVERY_STEPS = 2
LIMIT_SECONDS = 600.0
MANY_STEPS = 1000
"""More than it does before the last fault."""
CHANGES: dict[str, Any] = {
    **FEW_SAMPLES,
    # Two pods of the critic have no room for the reference, so there is none.
    "algorithm": {"kl": {"inReward": False}},
    # Both of the critic's pods compute each sequence: keys are gathered between them.
    "critic": {**FEW_SAMPLES["critic"], "sequenceParallelSize": 2},
    "placement": {"ref": None},
    "pools": small_pools(critic_nodes=2),
    # A process that hangs is lost after the longest phase.
    "trainer": {"totalSteps": MANY_STEPS, "validateEverySteps": 0, "phaseTimeoutSeconds": 180},
    # A checkpoint is complete before the next step, so it is known how many steps a fault may cost.
    "checkpoint": {"everySteps": EVERY_STEPS, "export": "Never", "async": False, "keep": 1},
}
HEADING = "| fault | reason | steps lost | to the next new step, s | retries |\n|---|---|---|---|---|"
DISK_BYTES = 10 * 2**30
"""Of the disk with the job's files: room for two checkpoints, of 3.3 GB each."""
OUTAGE_SECONDS = 30


def fill_disk(site: Site, job: str) -> None:
    """Leave no room on the job's disk until its attempt has failed."""
    attempt, filler = site.job(job)["status"]["attempt"], site.root(job) / "filler"
    free = os.statvfs(filler.parent)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, free.f_bavail * free.f_frsize)

    def missing() -> str:
        failed = site.job(job)["status"].get("lastFailure", {}).get("attempt")
        return "" if failed == attempt else f"the last failed attempt is {failed}"

    try:
        wait_until(f"the end of attempt {attempt}", missing, limit=LIMIT_SECONDS, interval=1)
    finally:
        filler.unlink()


@contextmanager
def disk_of_its_own(site: Site, image: Path) -> Iterator[None]:
    """Give the job's folder a disk of `DISK_BYTES`, so that a full one harms nobody else."""
    folder = site.root(NAME)
    folder.mkdir(parents=True)
    with image.open("wb") as file:
        file.truncate(DISK_BYTES)
    run(["mkfs.ext4", "-q", image], limit=60)
    run(["mount", "-o", "loop", image, folder], limit=60)
    try:
        (folder / "lost+found").rmdir()
        # The folder of the namespace too: other jobs create theirs in it.
        for each in (folder, folder.parent, folder.parent.parent):
            each.chmod(0o777)
        yield
    finally:
        run(["umount", folder], limit=60)
        image.unlink()


@dataclass(frozen=True)
class Fault:
    """What is done to the job, and what it may cost.

    reasons: of the attempt that it ends; none: the attempt goes on. counted: in `status.retries`. new_cluster: the
    RayCluster is replaced, because it is lost, or may be the cause of a failure for which no pod was lost.
    """

    inject: Injection
    reasons: tuple[str, ...] = ()
    counted: str = "infrastructure"
    new_cluster: bool = False


FAULTS = {
    "a pod of the critic (1 of 2) is deleted": Fault(delete_pod(CRITIC), ("WorkerLost", "PodLost")),
    "the actor's pod is deleted": Fault(delete_pod(ACTOR), ("WorkerLost", "PodLost")),
    "a process of the critic is killed": Fault(send_signal(CRITIC, r"^ray::WorkerProcess"), ("WorkerLost",)),
    "the only engine's process is killed": Fault(send_signal(ACTOR, r"^VLLM::EngineCore"), ("WorkerLost",)),
    # By SIGKILL, as by the kernel when memory runs out.
    "the driver's process is killed": Fault(
        send_signal(HEAD, r"^python -m ppojob_trainer\.main"), ("OutOfMemory",), counted="user"
    ),
    "a process of the critic is stopped (SIGSTOP)": Fault(
        send_signal(CRITIC, r"^ray::WorkerProcess", signal.SIGSTOP), ("PhaseTimeout",), new_cluster=True
    ),
    "the disk is full when a checkpoint is saved": Fault(fill_disk, ("CheckpointUnwritable",), counted="user"),
    "the node of the critic's pods is drained": Fault(drain, ("Preempted",), counted="ignored"),
    "the operator's pod is deleted": Fault(delete_operator),
    f"the API server is killed, and started after {OUTAGE_SECONDS} s": Fault(
        kill_component("kube-apiserver", OUTAGE_SECONDS)
    ),
    "the RayCluster is deleted": Fault(delete_cluster, ("ClusterDeleted",), counted="ignored", new_cluster=True),
    "the head's pod is deleted": Fault(delete_pod(HEAD), ("HeadLost",), new_cluster=True),
}


@dataclass(frozen=True)
class Recovery:
    """What one fault led to. cluster: the RayCluster before. steps_lost: done before it, and done again."""

    cluster: str
    attempt: int
    steps_lost: int
    seconds: float
    """From the fault to the end of the next new step."""
    before: Any
    """The status before the fault."""
    after: Any
    """The status after that step."""

    def counted(self) -> dict[str, int]:
        """Return by how much each number of the retries has grown."""
        new, old = self.after["retries"], self.before.get("retries", {})
        grown = {name: new[name] - old.get(name, 0) for name in ("user", "infrastructure", "ignored", "total")}
        return {name: number for name, number in grown.items() if number}


@pytest.fixture(scope="module")
def disk(site: Site, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with disk_of_its_own(site, tmp_path_factory.mktemp("disk") / "image"):
        yield


@pytest.fixture(scope="module")
def recoveries(site: Site, disk: None, request: pytest.FixtureRequest) -> Iterator[dict[str, Recovery]]:
    """By fault; the job is completed afterwards."""
    selected = selected_faults(request.session.items)
    site.apply(NAME, CHANGES)
    found: dict[str, Recovery] = {}
    step = 0
    for words, fault in selected.items():
        # A checkpoint is saved and a step after it is done, so that there is something to lose.
        await_step(site, NAME, (step // EVERY_STEPS + 1) * EVERY_STEPS + 1)
        assert len(pods(site, NAME, CRITIC)) == 2
        found[words] = recover(site, fault)
        step = max(records(site, NAME))
        print(f"\n{row(words, found[words])}", end="", flush=True)
    site.patch(NAME, trainer={"totalSteps": step + EVERY_STEPS})
    site.await_condition(NAME, "Complete", "True", limit=LIMIT_SECONDS)
    print(f"\n\n{HEADING}\n{table(found)}")
    yield found
    site.delete(NAME)


def selected_faults(items: Sequence[pytest.Item]) -> dict[str, Fault]:
    """Return the faults that one of the tests to run is about."""
    wanted = {item.callspec.params.get("words") for item in items if hasattr(item, "callspec")}
    return {words: fault for words, fault in FAULTS.items() if words in wanted}


def recover(site: Site, fault: Fault) -> Recovery:
    before, last, moment = site.job(NAME)["status"], max(records(site, NAME)), time.time()
    fault.inject(site, NAME)
    attempt, resumed_after = before["attempt"], last
    if fault.reasons:
        attempt += 1
        resumed_after = await_resumption(site, NAME, attempt)
        # A drain leaves time for the running step.
        last = max(last, resumed_after)
    finished = await_step(site, NAME, resumed_after + 1, since=moment)

    def missing() -> str:
        progress = site.job(NAME)["status"].get("progress", {})
        return "" if (progress.get("attempt"), progress.get("step", 0) > resumed_after) == (attempt, True) else "late"

    wait_until("the report of the step", missing, limit=LIMIT_SECONDS, interval=1)
    cluster = before["rayCluster"]["name"]
    return Recovery(cluster, attempt, last - resumed_after, finished - moment, before, site.job(NAME)["status"])


def row(words: str, found: Recovery) -> str:
    reason = found.after["lastFailure"]["reason"] if found.counted() else "-"
    counted = ", ".join(f"{name} {number}" for name, number in found.counted().items() if name != "total") or "none"
    return f"| {words} | {reason} | {found.steps_lost} | {found.seconds:.0f} | {counted} |"


def table(found: dict[str, Recovery]) -> str:
    return "\n".join(row(words, recovery) for words, recovery in found.items())


@pytest.mark.parametrize("words", FAULTS)
def test_at_most_the_steps_since_the_last_checkpoint_are_lost(recoveries: dict[str, Recovery], words: str) -> None:
    recovery = recoveries[words]

    assert 0 <= recovery.steps_lost <= (EVERY_STEPS if FAULTS[words].reasons else 0)


@pytest.mark.parametrize("words", [words for words, fault in FAULTS.items() if fault.reasons])
def test_the_loss_has_its_reason_and_is_counted_once(recoveries: dict[str, Recovery], words: str) -> None:
    recovery, fault = recoveries[words], FAULTS[words]

    failure = recovery.after["lastFailure"]
    assert (failure["reason"] in fault.reasons, failure["attempt"]) == (True, recovery.attempt - 1), failure
    assert recovery.counted() == {fault.counted: 1, "total": 1}


@pytest.mark.parametrize("words", [words for words, fault in FAULTS.items() if not fault.reasons])
def test_the_attempt_continues(recoveries: dict[str, Recovery], words: str) -> None:
    recovery = recoveries[words]

    assert recovery.after["attempt"] == recovery.before["attempt"]
    assert recovery.counted() == {}


@pytest.mark.parametrize("words", FAULTS)
def test_the_raycluster_is_replaced_only_if_it_is_lost_or_may_be_the_cause(
    recoveries: dict[str, Recovery], words: str
) -> None:
    recovery = recoveries[words]

    assert (recovery.after["rayCluster"]["name"] != recovery.cluster) == FAULTS[words].new_cluster


def test_every_step_was_done_in_the_end(site: Site, recoveries: dict[str, Recovery]) -> None:
    steps = sorted(records(site, NAME))

    assert steps == [*range(1, site.job(NAME)["status"]["progress"]["step"] + 1)]
