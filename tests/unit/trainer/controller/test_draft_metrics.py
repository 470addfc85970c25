"""What drafts were worth, of the engines of all pools."""

from __future__ import annotations

from dataclasses import replace

from ppojob_trainer.controller.generation import Generation
from ppojob_trainer.controller.phases import Phases
from tests.unit.trainer.controller.fake_engines import FakeDrafts, FakeRollouts
from tests.unit.trainer.controller.fake_ports import fake_ports
from tests.unit.trainer.controller.fake_world import FakeBatch, World

METRICS = ("rollout/accepted_tokens_per_draft", "rollout/speculative_steps_fraction")


def generation_of(own: FakeDrafts, shared: FakeDrafts) -> Generation[FakeBatch]:
    world = World()
    rollouts = [FakeRollouts(world), FakeRollouts(world, "_shared")]
    for rollout, drafts in zip(rollouts, (own, shared), strict=True):
        rollout.drafts = drafts
    ports = replace(fake_ports(world), rollout=rollouts[0], shared={"rollout_shared": rollouts[1]})
    return Generation(ports, Phases({}, 1000.0, clock=lambda: world.time.now))


def test_they_are_of_all_pools_and_each_generation_counts_once() -> None:
    generation = generation_of(FakeDrafts(100, 40, 50), FakeDrafts(60, 40, 30))

    found = generation.metrics()

    assert [found[name] for name in METRICS] == [1.0, 0.5]
    assert not set(METRICS) & generation.metrics().keys()


def test_drafts_that_never_paid_off_are_reported() -> None:
    found = generation_of(FakeDrafts(100, 0, 0), FakeDrafts()).metrics()

    assert [found[name] for name in METRICS] == [0.0, 0.0]
