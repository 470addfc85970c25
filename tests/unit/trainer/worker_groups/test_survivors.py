"""Which processes of an earlier attempt continue, and which are ended."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
from ray.exceptions import RayActorError

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.main.groups import continuing_roles
from ppojob_trainer.worker_groups import survivors as survivors_module
from ppojob_trainer.worker_groups.launch import Launcher
from ppojob_trainer.worker_groups.placement import PlacedPool
from ppojob_trainer.worker_groups.survivors import NAMESPACE, NO_SURVIVORS, Names, Survivors, find_survivors, note_logs
from tests.bad_specs import GOOD

NAMES = Names("this", 7)
ROLES = {"a": frozenset({"actor", "rollout"}), "c": frozenset({"critic"})}


@dataclass(frozen=True)
class Process:
    """Answers as its handle would; a failure is raised."""

    name: str
    failure: Exception | None = None

    @property
    def renew(self) -> Process:
        return self

    async def remote(self, attempt: int) -> Path:
        assert attempt == NAMES.attempt
        if self.failure is not None:
            raise self.failure
        return Path(f"/logs/{self.name}.log")


@dataclass
class Ray:
    """The processes and placement groups that are there, by name."""

    processes: dict[str, Process] = field(default_factory=dict)
    groups: set[str] = field(default_factory=set)
    ended: list[str] = field(default_factory=list)

    def start(
        self,
        pool: str,
        role: str,
        number: int = 1,
        key: str = "this",
        failure: Exception | None = None,
        first_rank: int = 0,
    ) -> None:
        for rank in range(first_rank, first_rank + number):
            name = Names(key, 4).of_process(pool, role, rank, number)
            self.processes[name] = Process(name, failure)
        self.groups.add(Names(key, 4).of_pool(pool))

    def kill(self, process: Process) -> None:
        self.ended.append(process.name)

    def placed(self, prefix: str) -> list[str]:
        return [name for name in self.groups if name.startswith(prefix)]

    def listed(self, all_namespaces: bool) -> list[dict[str, str]]:
        assert all_namespaces
        others = [{"name": "a/b/c/d/e/f", "namespace": "other"}, {"name": "plain", "namespace": NAMESPACE}]
        return [*({"name": name, "namespace": NAMESPACE} for name in self.processes), *others]


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> Ray:
    """Two pools with all their processes, of an attempt of the same spec."""
    ray = Ray()
    ray.start("a", "actor", 2)
    ray.start("a", "rollout")
    ray.start("c", "critic", 2)

    def remove(except_for: set[str]) -> None:
        ray.groups &= except_for

    monkeypatch.setattr(survivors_module, "list_named_actors", ray.listed)
    monkeypatch.setattr(survivors_module, "_placed_groups", ray.placed)
    monkeypatch.setattr(survivors_module, "get_placement_group", lambda name: name)
    monkeypatch.setattr(survivors_module, "_remove_groups", remove)
    monkeypatch.setattr(survivors_module.ray, "get_actor", lambda name, _: ray.processes[name])
    monkeypatch.setattr(survivors_module.ray, "kill", ray.kill)
    return ray


def found(*, can_continue: bool = True) -> Survivors:
    return asyncio.run(find_survivors(NAMES, ROLES, can_continue=can_continue))


def names_of(survivors: Survivors, pool: str, role: str) -> list[str]:
    return [cast("Any", process).name for process in survivors.of_role(pool, role)]


def test_whole_pools_go_on_with_their_processes_in_the_order_of_ranks(ray: Ray, tmp_path: Path) -> None:
    ray.processes = dict(reversed(ray.processes.items()))

    survivors = found()

    assert (survivors.number, ray.ended) == (5, [])
    assert names_of(survivors, "a", "actor") == ["this/a/actor/0/2/4", "this/a/actor/1/2/4"]
    assert survivors.groups == {"a": "this/a/4", "c": "this/c/4"}
    note_logs(survivors.logs, tmp_path)
    assert "/logs/this/a/actor/1/2/4.log" in (tmp_path / "actor-1.log").read_text()


def test_processes_of_one_role_in_several_pools_keep_their_ranks(ray: Ray, tmp_path: Path) -> None:
    ray.start("a", "reward", 2)
    ray.start("c", "reward", 1, first_rank=2)

    survivors = found()

    assert names_of(survivors, "c", "reward") == ["this/c/reward/2/1/4"]
    note_logs(survivors.logs, tmp_path)
    assert [(tmp_path / f"reward-{rank}.log").exists() for rank in range(4)] == [True, True, True, False]
    started = Launcher(tmp_path, 1.0, survivors=survivors)
    pool = PlacedPool("c", cast("Any", None), (), 0.5)
    kept = started.start("reward", lambda _: None, pool, [], first_rank=2)
    assert kept._ranks == (2,)


@pytest.mark.parametrize("lost", ["this/a/actor/1/2/4", "this/a/rollout/0/1/4"])
def test_a_pool_that_lost_a_process_is_ended_as_a_whole_and_the_others_continue(ray: Ray, lost: str) -> None:
    del ray.processes[lost]

    survivors = found()

    assert set(ray.ended) == {name for name in ray.processes if name.startswith("this/a")}
    assert ray.groups == {"this/c/4"}
    assert (survivors.of_role("a", "actor"), len(survivors.of_role("c", "critic"))) == ((), 2)


@pytest.mark.parametrize("failure", [RayActorError(error_msg="not loaded yet"), TimeoutError()])
def test_a_pool_with_a_process_that_cannot_go_on_is_ended(ray: Ray, failure: Exception) -> None:
    ray.start("c", "critic", 2, failure=failure)

    survivors = found()

    assert set(ray.ended) == {"this/c/critic/0/2/4", "this/c/critic/1/2/4"}
    assert (survivors.number, ray.groups) == (3, {"this/a/4"})


def test_a_pool_whose_bundles_are_not_all_placed_is_ended(ray: Ray) -> None:
    ray.groups.remove("this/c/4")

    assert found().processes.keys() == {"a"}
    assert set(ray.ended) == {"this/c/critic/0/2/4", "this/c/critic/1/2/4"}


def test_without_a_checkpoint_nothing_continues(ray: Ray) -> None:
    survivors = found(can_continue=False)

    assert (survivors.number, set(ray.ended), ray.groups) == (0, set(ray.processes), set())
    assert survivors.actor_options("a", "actor", 0, 2)["name"] == "this/a/actor/0/2/7", "but it may continue from here"


def test_processes_of_another_spec_and_of_pools_that_are_gone_are_ended(ray: Ray) -> None:
    ray.start("a", "actor", key="that")
    ray.start("old", "actor")

    assert found().number == 5
    assert ray.ended == ["that/a/actor/0/1/4", "this/old/actor/0/1/4"]


def test_a_process_that_two_attempts_have_left_does_not_continue(ray: Ray) -> None:
    name = Names("this", 5).of_process("c", "critic", 0, 2)
    ray.processes[name] = Process(name)

    assert found().processes.keys() == {"a"}
    assert name in ray.ended


def test_only_roles_that_can_continue_get_a_name() -> None:
    survivors = Survivors(NAMES, ROLES)

    assert survivors.actor_options("a", "judge", 0, 1) == {}
    assert survivors.pool_options("elastic") == {}
    assert survivors.pool_options("c") == {"name": "this/c/7", "lifetime": "detached"}
    assert (survivors.may_continue("critic"), survivors.may_continue("judge")) == (True, False)
    assert (NO_SURVIVORS.actor_options("a", "actor", 0, 2), NO_SURVIVORS.pool_options("a")) == ({}, {})


def spec_of(**changes: Any) -> PPOJobSpec:
    return resolve(parse_spec({**GOOD["spec"], **changes}))


def test_another_spec_or_job_has_other_names() -> None:
    spec = spec_of()

    assert Names.of("uid", spec, 1) == Names.of("uid", spec_of(), 1)
    changed = spec_of(trainer={"totalSteps": 7})
    assert len({Names.of("uid", spec, 1).key, Names.of("other", spec, 1).key, Names.of("uid", changed, 1).key}) == 3


def test_roles_that_can_continue() -> None:
    pools = [{"name": "a", "gpusPerNode": 2}, {"name": "c", "gpusPerNode": 2}]
    placement = {"actor": "a", "critic": "c", "ref": ["c"], "reward": ["c"]}
    workers = [
        {
            "name": "judge",
            "module": "m",
            "className": "Judge",
            "pool": "c",
            "hooks": [{"after": "Score", "method": "m"}],
        }
    ]
    common: dict[str, Any] = {"pools": pools, "placement": placement, "algorithm": {"kl": {"inReward": True}}}

    of_c = {"critic", "ref", "reward"}
    assert continuing_roles(spec_of(**common)) == {"a": {"data", "actor", "rollout"}, "c": of_c}
    assert continuing_roles(spec_of(**common, workers=workers))["c"] == of_c
    in_both = {**common, "placement": {**placement, "ref": ["c", "a"]}}
    assert continuing_roles(spec_of(**in_both)) == {
        "a": {"data", "actor", "rollout", "ref"},
        "c": {"critic", "ref_c", "reward"},
    }
    scored = {"type": "Both", "function": {"module": "m", "numWorkers": 2}}
    model = {"actor": {"path": "/m"}, "reward": {"path": "/rm"}}
    with_copies = {**common, "placement": {**placement, "reward": ["c", "a"]}, "reward": scored, "model": model}
    assert continuing_roles(spec_of(**with_copies)) == {
        "a": {"data", "actor", "rollout", "reward", "reward_model"},
        "c": {"critic", "ref", "reward", "reward_model_c"},
    }
    divided = {"tensorParallelSize": 2}
    assert continuing_roles(spec_of(**common, rollout=divided))["a"] >= {"rollout", "rollout_gpu_holder"}
    own = {"engine": "Class", "engineClass": {"module": "m", "className": "Engine"}, "miniBatchSize": 8}
    assert continuing_roles(spec_of(**common, critic=own)).keys() == {"a"}
    assert continuing_roles(spec_of(**common, actor=own)) == {}, "the actor's engine computes the reference"
    assert continuing_roles(spec_of(**in_both, actor=own)) == {}, "in each of its pools"
    elastic = [*pools, {"name": "e", "gpusPerNode": 2, "elastic": {"minNodes": 0, "maxNodes": 2}}]
    with_elastic = {"pools": elastic, "placement": {**placement, "rollout": ["a", "e"]}}
    assert continuing_roles(spec_of(**with_elastic)).keys() == {"a", "c"}
