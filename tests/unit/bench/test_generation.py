"""The engine that is measured alone is set up as the rollout's."""

from pathlib import Path

import pytest

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_manifest
from ppojob_trainer.worker_groups.roles.rollout import rollout_environment
from ppojob_trainer.worker_groups.worker_process import num_threads
from tests.bench import workload
from tests.bench.generation import _environment
from tests.bench.layouts import layout

TINY = workload.Size("tiny", num_prompts=8, prompt_tokens=20, response_tokens=16, vocabulary=512)


@pytest.mark.parametrize(("device", "replicas"), [("CUDA", 2), ("CPU", 2)])
def test_it_has_the_variables_and_the_threads_of_a_replica(device: str, replicas: int) -> None:
    _, _, spec = parse_manifest(workload.job(Path("/w"), TINY, layout("2+1", 3), 3, device))
    spec = resolve(spec)

    found = _environment(spec)

    assert found["OMP_NUM_THREADS"] == str(num_threads(replicas, has_gpu=device == "CUDA"))
    wanted = rollout_environment(spec, spec.placement.rollout_pools[0])
    assert {name: found[name] for name in wanted if name != "OMP_NUM_THREADS"} == {
        name: value for name, value in wanted.items() if name != "OMP_NUM_THREADS"
    }
