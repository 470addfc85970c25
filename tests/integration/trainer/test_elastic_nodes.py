"""Nodes of an elastic pool leave and join a real Ray cluster, and every response is the one of its seed.

A, B generate ── A is killed in mid-generation ── C joins at a push ── B is killed in a push ── C is killed: none is
left ── D comes back, and the generation that waited continues
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.controller.generation import Generation
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.controller.ports import Ports
from ppojob_trainer.main.connection import connected
from ppojob_trainer.protocol import DataProto, Keys, Ragged
from ppojob_trainer.worker_groups.elastic_nodes import NodesOfPool
from ppojob_trainer.worker_groups.launch import Launcher, wait_until_up
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.placement import place
from ppojob_trainer.worker_groups.roles import elastic_rollout
from ppojob_trainer.worker_groups.roles.data import DataGroup, Prompt
from ppojob_trainer.worker_groups.roles.elastic_rollout import ElasticRolloutGroup
from ppojob_trainer.worker_groups.roles.rollout import RolloutWorker, sample_seed
from ppojob_trainer.worker_groups.roles.rollout_group import Replicas
from ppojob_trainer.worker_groups.roles.weights import WeightsGroup
from ppojob_trainer.worker_groups.stored_rows import store_rows
from ppojob_trainer.worker_groups.table import Table
from tests.integration.trainer.light_engines import (
    LOST_IN_PUSH,
    LightActor,
    LightData,
    LightReplica,
    limit_parts,
    response_of,
)
from tests.integration.trainer.ray_clusters import new_cluster, started

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NUM_PROMPTS, NUM_SAMPLES, LIMIT_S = 6, 2, 120.0


def spec() -> PPOJobSpec:
    spot = {"name": "spot", "gpusPerNode": 1, "elastic": {"minNodes": 2, "maxNodes": 3}}
    return resolve(
        parse_spec(
            {
                "image": "i",
                "device": "CPU",
                "model": {"actor": {"path": "/m"}},
                "data": {"train": {"reasoningGym": {"task": "t"}}, "trainBatchSize": 8},
                "reward": {"function": {"module": "r"}},
                "algorithm": {"advantageEstimator": "GRPO"},
                "rollout": {"samplesPerPrompt": NUM_SAMPLES},
                "actor": {"miniBatchSize": 8},
                "pools": [{"name": "actor", "gpusPerNode": 1}, spot],
                "placement": {"actor": "actor", "rollout": ["spot"]},
                "trainer": {"seed": 7},
                "storage": {"claimName": "c"},
            }
        )
    )


class Nodes:
    """The cluster, whose nodes of pool `spot` the test adds and kills."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self.spot: list[Any] = []

    def add(self) -> None:
        self.spot.append(started(partial(self._cluster.add_node, num_cpus=2, resources={"pool_spot": 1})))

    def kill(self, node_id: str) -> None:
        [node] = [each for each in self.spot if each.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    # Ray asks a node's health every 3 s, and believes in its loss after 5 answers.
    monkeypatch.setenv("RAY_health_check_period_ms", "1000")
    monkeypatch.setenv("RAY_health_check_failure_threshold", "3")
    cluster = new_cluster(num_cpus=2, resources={"pool_actor": 1})
    try:
        found = Nodes(cluster)
        found.add()
        found.add()
        monkeypatch.setenv("RAY_ADDRESS", cluster.address)
        with connected(spec()):
            yield found
    finally:
        cluster.shutdown()


@dataclass(frozen=True)
class Prompts:
    """See `controller.ports.Prompts`."""

    batch: Table
    samples: list[Prompt]
    epoch: int = 0

    @classmethod
    def make(cls) -> Prompts:
        prompts = [prompt for prompt in range(NUM_PROMPTS) for _ in range(NUM_SAMPLES)]
        columns = {
            Keys.PROMPT_IDS: Ragged.from_rows([[prompt + 1] for prompt in prompts], torch.int32),
        }
        others: dict[str, list[Any]] = {
            Keys.UID: [str(prompt) for prompt in prompts],
            Keys.SAMPLE_INDEX: [row % NUM_SAMPLES for row in range(len(prompts))],
        }
        batch = DataProto.from_dict(columns).with_fields(non_tensors=others)
        return cls(Table.of_stored(store_rows(batch)), [Prompt(("t", prompt), 1) for prompt in prompts])


class Watched(ElasticRolloutGroup):
    """Tells whose responses were reported, and are kept outside of the pool."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.reported: list[int] = []

    async def kept(self, rank: int, responses: Table) -> Table:
        found = await super().kept(rank, responses)
        self.reported.append(rank)
        return found

    async def wait_for_report(self, rank: int) -> None:
        """Wait until the engine has reported responses after this call."""
        self.reported.clear()
        async with asyncio.timeout(LIMIT_S):
            while rank not in self.reported:
                await asyncio.sleep(0.05)


@dataclass
class Run:
    """The groups of a job with nothing but an actor, engines and the data's process."""

    rollout: Watched
    actor: Any
    weights: WeightsGroup
    generation: Generation[Table]
    version: int = 0

    async def push(self) -> dict[str, float]:
        """Train the actor and send its weights; they are 10 times the version."""
        self.version += 1
        await self.actor.call(LightActor.train, 10.0 * self.version)
        return await self.weights.push(self.version)

    async def generate(self) -> None:
        """Generate with the current weights, and compare all responses with those of their seeds."""
        prompts = Prompts.make()
        rollout = await self.generation.write(prompts, self.version)
        batch = rollout.batch.rows(Share(tuple(range(NUM_PROMPTS * NUM_SAMPLES)))).pull(LIMIT_S).batch
        sequences = batch.ragged(Keys.INPUT_IDS).to_lists()
        for row, tokens in enumerate(sequences):
            prompt, sample = divmod(row, NUM_SAMPLES)
            seed = sample_seed(7, self.version, str(prompt), sample)
            assert tokens == [prompt + 1, *response_of(seed, 10.0 * self.version)], f"row {row}"

    def node_of(self, rank: int) -> str:
        return self.rollout._live[rank].place.node_id


async def made(folder: Path) -> Run:
    job, launcher = spec(), Launcher(folder, LIMIT_S)
    [pool] = (await place(job, LIMIT_S)).values()
    actor = launcher.start("actor", partial(LightActor, spec=job), pool, pool.bundles)
    data = DataGroup(launcher.start("data", LightData, pool, pool.bundles))
    await wait_until_up([actor, data.group])

    def start(reserved: Any, rank: int) -> Replicas:
        make = partial(LightReplica, spec=job)
        return Replicas(launcher.start("rollout", make, reserved, reserved.bundles, first_rank=rank))

    none = launcher.none_of("rollout", RolloutWorker)
    rollout = Watched(job, "spot", NodesOfPool(job, "spot"), start, none, data.keep)
    await rollout.begin_load()
    await rollout.load()
    weights = WeightsGroup(cast("Any", actor), [rollout], job)
    await weights.connect()
    unused = cast("Any", None)
    ports = Ports(data, rollout, unused, None, {}, unused, unused, weights)
    run: Run

    async def load_again(step: int) -> object:
        return await weights.push(run.version)

    run = Run(rollout, actor, weights, Generation(ports, Phases({"rollout": "spot"}, 300.0), load_again))
    return run


async def whole_story(nodes: Nodes, folder: Path) -> None:
    run = await made(folder)
    watching = asyncio.create_task(run.rollout.watch())
    try:
        await run.push()
        await run.generate()
        assert run.rollout.ranks == [0, 1]
        assert run.generation.metrics()["rollout/repeated_samples"] == 0

        await run.push()
        # The other engine cannot take all samples meanwhile.
        waits = limit_parts(folder, 1, 0)
        limit_parts(folder, 0, 1)
        generating = asyncio.create_task(run.generate())
        await run.rollout.wait_for_report(0)
        assert not generating.done()
        await asyncio.to_thread(nodes.kill, run.node_of(0))
        waits.unlink()
        await generating
        found = run.generation.metrics()
        assert (found["rollout/engines"], found["rollout/elastic_losses"]) == (1, 1)
        assert min(found["rollout/repeated_samples"], found["rollout/repeated_tokens"], found["rollout/lost_s"]) > 0

        nodes.add()
        await asyncio.wait_for(run.rollout.wait_for_engine(), LIMIT_S)
        assert run.rollout.engines.keys() == {1}, "it has no weights yet"
        assert run.version + 1 == LOST_IN_PUSH
        await run.push()
        assert run.rollout.ranks == [2], "the new engine has the weights; the node of the other one was killed"
        await run.generate()

        await run.push()
        limit_parts(folder, 2, 1)
        generating = asyncio.create_task(run.generate())
        await run.rollout.wait_for_report(2)
        assert not generating.done()
        await asyncio.to_thread(nodes.kill, run.node_of(2))
        async with asyncio.timeout(LIMIT_S):
            while run.rollout.ranks:
                await asyncio.sleep(0.1)
        assert not generating.done(), "it waits for an engine"
        nodes.add()
        await asyncio.wait_for(generating, LIMIT_S)
        assert run.rollout.ranks == [3]
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        run.rollout.release()


def test_nodes_leave_and_join_and_every_response_is_that_of_its_seed(
    nodes: Nodes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(elastic_rollout, "POLL_S", 0.5)
    with caplog.at_level(logging.WARNING):
        asyncio.run(whole_story(nodes, tmp_path))

    assert "the weights are sent again, without the engines that were lost meanwhile" in caplog.text
    assert "no engine is left: waiting for pods of the elastic pools spot" in caplog.text
