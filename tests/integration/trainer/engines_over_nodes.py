"""Runs whose engine is divided over two nodes of a real Ray on this machine: on the CPU, and on GPUs in tests/gpu."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from ray.util.placement_group import placement_group_table

from ppojob_trainer.main import run_job
from ppojob_trainer.main.failures import JobFailedError
from tests.integration.trainer.ray_clusters import new_cluster, started
from tests.integration.trainer.runs import job_of, records_of

ENGINE = "rollout"
"""The pool with the engine, and with nothing else."""


@dataclass(frozen=True)
class Pods:
    """The nodes of each pool, and their cluster."""

    cluster: Any
    nodes: Mapping[str, Sequence[Any]]

    def kill_second_node(self) -> None:
        """Kill the node with the second bundle of the engine's pool: the engine itself is on the node of the first."""
        second = [ids[1] for table in placement_group_table().values() if len(ids := table["bundles_to_node_id"]) == 2]
        [node] = [node for node in self.nodes[ENGINE] if node.node_id in second]
        self.cluster.remove_node(node, allow_graceful=False)


@contextmanager
def pods_of(pools: Mapping[str, Sequence[int | None]]) -> Iterator[Pods]:
    """Start a head, and a Ray node for each entry of each pool: the number of its GPU; None: it has none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "disabled")
        cluster = new_cluster(num_cpus=0)
        try:
            nodes: dict[str, list[Any]] = {name: [] for name in pools}
            for name, gpu in ((name, gpu) for name, gpus in pools.items() for gpu in gpus):
                on_gpu = {} if gpu is None else {"num_gpus": 1, "env_vars": {"CUDA_VISIBLE_DEVICES": str(gpu)}}
                pod = partial(cluster.add_node, num_cpus=2, resources={f"pool_{name}": 1}, **on_gpu)
                nodes[name].append(started(pod))
            patch.setenv("RAY_ADDRESS", cluster.address)
            yield Pods(cluster, nodes)
        finally:
            cluster.shutdown()


def run_until_a_node_is_gone(root: Path, spec: dict[str, Any], pods: Pods, num_steps: int) -> dict[int, dict[str, Any]]:
    """Run a job that has no end in time, and kill a node after so many steps; return the records of these steps.

    Checks that the job failed, and that the engine's loss was the reason.
    """

    has_ended, stop = threading.Event(), threading.Event()

    def kill_in_time() -> None:
        try:
            while max(records_of(root), default=0) < num_steps:
                if has_ended.wait(0.05):
                    return
            pods.kill_second_node()
        except BaseException:
            stop.set()
            raise

    with ThreadPoolExecutor(1) as threads:
        killing = threads.submit(kill_in_time)
        try:
            with pytest.raises(JobFailedError, match="the engine has lost its workers on the node with address"):
                run_job(job_of(root, spec), attempt=0, stop=stop)
        finally:
            has_ended.set()
    killing.result()
    return {step: record for step, record in records_of(root).items() if step <= num_steps}
