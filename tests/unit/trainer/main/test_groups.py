"""In which order the roles become ready: an engine may look at a GPU when those who share it are loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.engine import Engine, EngineClass
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.reward import RewardFunction, RewardSpec, RewardType
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_api.v1alpha1.workers import WorkerSpec
from ppojob_trainer.controller.phases import Phases
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.main import groups
from ppojob_trainer.main.failures import failure_record
from ppojob_trainer.main.groups import Groups
from ppojob_trainer.worker_groups.errors import WorkerImportError
from ppojob_trainer.worker_groups.placement import Bundle, PlacedPool
from ppojob_trainer.worker_groups.roles.data import DataWorker, LoadedData
from ppojob_trainer.worker_groups.roles.trained import ModelSize, TrainedWorker

GB = 10**9


def spec_of(device: str, shared: Sequence[str]) -> PPOJobSpec:
    return resolve(
        parse_spec(
            {
                "image": "i",
                "device": device,
                "model": {"actor": {"path": "/m"}},
                "data": {"train": {"reasoningGym": {"task": "t"}}, "trainBatchSize": 256},
                "reward": {"function": {"module": "r"}},
                "pools": [{"name": "a", "gpusPerNode": 1}, {"name": "c", "gpusPerNode": 1}],
                "placement": {"actor": "a", "rollout": ["a", *shared], "critic": "c"},
                "storage": {"claimName": "c"},
            }
        )
    )


@dataclass
class Story:
    """What happened, in order; a load of a role in `held` waits for its event."""

    told: list[str] = field(default_factory=list)
    held: dict[str, asyncio.Event] = field(default_factory=dict)
    failing: str = ""
    size: ModelSize = field(default_factory=lambda: ModelSize(GB, 80 * GB))
    given: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def role(self, name: str) -> Any:
        return SimpleNamespace(group=_Group(self, name))

    async def do(self, what: str) -> None:
        if what in self.held:
            await self.held[what].wait()
        if what == self.failing:
            raise RuntimeError(what)
        self.told.append(what)


@dataclass(frozen=True, eq=False)
class _Group:
    story: Story
    name: str

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        if method is TrainedWorker.rendezvous:
            return "host", 1
        if method is TrainedWorker.size:
            return self.story.size
        self.story.given[f"{self.name} {method.__name__}"] = arguments
        await self.story.do(f"{self.name} {method.__name__}")
        return LoadedData(["gsm8k"], steps_per_epoch=7) if method is DataWorker.load else [{}]


class _Rollout:
    def __init__(self, story: Story, name: str) -> None:
        self.groups, self._story, self._name = [_Group(story, name)], story, name

    async def begin_load(self) -> None:
        await self._story.do(f"{self._name} begins")

    async def load(self) -> None:
        await self._story.do(f"{self._name} measures")


@pytest.fixture
def story(monkeypatch: pytest.MonkeyPatch) -> Story:
    async def at_once(_: Any) -> None:
        return None

    monkeypatch.setattr(groups, "wait_until_up", at_once)
    return Story()


def made(story: Story, shared: Sequence[str]) -> Groups:
    async def connect() -> list[Any]:
        await story.do("weights connect")
        return [{}]

    return Groups(
        data=story.role("data"),
        reward=cast("Any", SimpleNamespace(function=story.role("reward"), models={})),
        rollout=cast("Any", _Rollout(story, "rollout")),
        shared={f"rollout_{pool}": cast("Any", _Rollout(story, f"rollout_{pool}")) for pool in shared},
        actor=story.role("actor"),
        critic=story.role("critic"),
        refs={},
        weights=cast("Any", SimpleNamespace(connect=connect)),
        custom=(),
        hooks=(),
    )


async def ready(story: Story, device: str = "CUDA", shared: Sequence[str] = ()) -> None:
    await groups.make_ready(made(story, shared), spec_of(device, shared), Phases({}, 60.0))


@pytest.mark.parametrize(("length", "total_steps"), [({}, 100), ({"total_steps": 5}, 5), ({"total_epochs": 3}, 21)])
async def test_the_learning_rate_schedules_get_the_length_of_the_run(
    story: Story, length: dict[str, int], total_steps: int
) -> None:
    spec = spec_of("CPU", [])
    trainer = spec.trainer.model_copy(update={"total_steps": None, **length})

    found = await groups.make_ready(made(story, []), spec.model_copy(update={"trainer": trainer}), Phases({}, 60.0))

    assert [story.given[f"{role} load"][-1] for role in ("actor", "critic")] == [total_steps] * 2
    assert found.steps_per_epoch == 7
    assert story.given["reward load"] == (["gsm8k"],)


@pytest.mark.parametrize(
    ("checkpoint", "is_prepared"),
    [
        ({"every_steps": 10}, True),
        ({"every_steps": 10, "asynchronous": False}, False),
        ({"every_steps": 0}, False),
        # The last step's checkpoint is not written in the background.
        ({"every_steps": 100}, False),
    ],
)
async def test_memory_for_saves_in_the_background_is_prepared_if_there_will_be_one(
    story: Story, checkpoint: dict[str, Any], is_prepared: bool
) -> None:
    story.size = ModelSize(GB, 80 * GB, host="h", host_bytes=1000 * GB)
    spec = spec_of("CUDA", [])
    trainer = spec.trainer.model_copy(update={"total_steps": 100})
    chosen = spec.checkpoint.model_copy(update=checkpoint)
    spec = spec.model_copy(update={"trainer": trainer, "checkpoint": chosen})

    await groups.make_ready(made(story, []), spec, Phases({}, 60.0))

    prepared = [what for what in story.told if what.endswith("prepare_saves")]
    assert prepared == (["actor prepare_saves", "critic prepare_saves"] if is_prepared else [])


@pytest.mark.parametrize("engine", ["FSDP", "Class"])
async def test_the_memory_of_the_users_own_engine_is_not_judged(story: Story, engine: str) -> None:
    story.size = ModelSize(10 * GB, 80 * GB)
    spec = spec_of("CUDA", [])
    own = {"engine": Engine(engine), "engine_class": EngineClass(module="own", class_name="Own")}
    trained = {role: getattr(spec, role).model_copy(update=own) for role in ("actor", "critic")}
    running = groups.make_ready(made(story, []), spec.model_copy(update=trained), Phases({}, 60.0))

    if engine == "Class":
        await running
    else:
        with pytest.raises(ModelMismatchError, match="pool a cannot hold its models"):
            await running


async def settled() -> None:
    for _ in range(50):
        await asyncio.sleep(0)


async def test_an_engine_measures_after_the_actor_on_its_gpu_and_not_after_the_critic_elsewhere(story: Story) -> None:
    story.held = {"actor load": asyncio.Event(), "critic load": asyncio.Event()}
    running = asyncio.create_task(ready(story))
    await settled()
    assert "rollout begins" in story.told
    assert "rollout measures" not in story.told

    story.held["actor load"].set()
    await settled()
    assert story.told[-2:] == ["actor load", "rollout measures"]

    story.held["critic load"].set()
    await running
    assert story.told[-2:] == ["critic load", "weights connect"]


async def test_engines_in_a_pool_that_is_shared_measure_when_the_critic_there_is_loaded_too(story: Story) -> None:
    story.held = {"critic load": asyncio.Event()}
    running = asyncio.create_task(ready(story, shared=["c"]))
    await settled()
    assert {"rollout begins", "rollout_c begins", "actor load"} <= set(story.told)
    assert "rollout_c measures" not in story.told

    story.held["critic load"].set()
    await running
    assert sorted(story.told[-4:]) == ["critic load", "rollout measures", "rollout_c measures", "weights connect"]
    assert story.told[-1] == "weights connect"


async def test_on_a_cpu_nobody_waits_for_anybody(story: Story) -> None:
    story.held = {"actor load": asyncio.Event()}
    running = asyncio.create_task(ready(story, device="CPU"))
    await settled()
    assert "rollout measures" in story.told

    story.held["actor load"].set()
    await running


@pytest.mark.parametrize("failing", ["actor check", "actor load", "critic load", "rollout begins", "rollout measures"])
async def test_whatever_fails_ends_the_start(story: Story, failing: str) -> None:
    story.failing = failing
    with pytest.raises(RuntimeError, match=failing):
        await asyncio.wait_for(ready(story), 60)


@pytest.mark.parametrize("failing", ["actor check", "critic check", "data load", "reward load"])
async def test_what_a_check_refuses_costs_no_load_of_a_model(story: Story, failing: str) -> None:
    story.failing = failing
    with pytest.raises(RuntimeError, match=failing):
        await ready(story, device="CPU")
    assert not {"actor load", "critic load", "weights connect"} & set(story.told)


class _Launched:
    """Processes of a role that are started in a pool."""

    def __init__(self, role: str) -> None:
        self.role = role

    def __len__(self) -> int:
        return 1

    def with_peers(self, number: int, num_stages: int) -> _Launched:
        return self

    def using(self, meta: object) -> _Launched:
        return self

    def extended_by(self, other: _Launched) -> _Launched:
        return other


def launcher_of(start: Callable[..., Any]) -> Any:
    return SimpleNamespace(start=start, none_of=lambda role, _: _Launched(role))


def test_a_users_class_that_is_not_there_is_named_before_any_process_starts(tmp_path: Path) -> None:
    (tmp_path / "shaper.py").write_text("")
    worker = {"name": "shaper", "path": str(tmp_path / "shaper.py"), "className": "Shaper", "pool": "c"}
    worker |= {"hooks": [{"after": "Score", "method": "shape"}]}
    spec = spec_of("CPU", []).model_copy(update={"workers": (WorkerSpec.model_validate(worker),)})
    launcher = cast("Any", SimpleNamespace(start=lambda *_, **__: pytest.fail("a process was started")))

    with pytest.raises(WorkerImportError, match=r"workers\[0\] \(shaper\)") as raised:
        groups.launch(spec, {}, launcher)

    record = failure_record(raised.value)
    assert (record.reason, record.kind) == (Reason.WORKER_IMPORT_FAILED, FailureKind.PERMANENT)


@pytest.mark.parametrize(("shared", "neighbours"), [([], {"actor"}), (["c"], {"actor", "critic"})])
def test_the_models_beside_engines_of_any_pool_make_room_for_the_weights(
    monkeypatch: pytest.MonkeyPatch, shared: list[str], neighbours: set[str]
) -> None:
    given: list[Any] = []
    monkeypatch.setattr(groups, "WeightsGroup", lambda *arguments: given.extend(arguments))
    bundles = (Bundle(0, "node"),)
    pools = {name: PlacedPool(name, cast("Any", None), bundles, 0.5) for name in ("a", "c")}

    launched = groups.launch(spec_of("CUDA", shared), pools, launcher_of(lambda role, *_, **__: _Launched(role)))

    _, rollouts, _, beside = given
    assert [rollout.pool for rollout in rollouts] == ["a", *shared]
    assert list(launched.shared) == [f"rollout_{pool}" for pool in shared]
    assert {group.role for group in beside} == neighbours


def test_models_in_several_pools_have_processes_in_each(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []
    monkeypatch.setattr(groups, "WeightsGroup", lambda *arguments: given.extend(arguments))
    pools = {name: PlacedPool(name, cast("Any", None), (Bundle(0, "node"),), 0.5) for name in ("a", "c")}
    placed: dict[str, str] = {}

    def start(role: str, make: object, pool: PlacedPool, *_: object, **__: object) -> Any:
        placed[role] = pool.name
        return _Launched(role)

    spec = spec_of("CUDA", [])
    placement = spec.placement.model_copy(update={"ref": ["a", "c"], "reward": ["a", "c"]})
    spec = spec.model_copy(update={"placement": placement, "reward": RewardSpec(type=RewardType.MODEL)})

    launched = groups.launch(spec, pools, launcher_of(start))

    assert {role: placed[role] for role in launched.refs} == {"ref": "a", "ref_c": "c"}
    assert {role: placed[role] for role in launched.reward.models} == {"reward_model": "a", "reward_model_c": "c"}
    assert (launched.ports().refs, launched.reward.function) == (launched.refs, None)
    assert {group.role for group in launched.others()} >= {"ref", "ref_c", "reward_model", "reward_model_c"}
    _, _, _, beside = given
    assert {group.role for group in beside} == {"actor", "ref", "reward_model"}, "c is a pool without engines"


def test_the_workers_of_a_reward_function_are_divided_over_its_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "WeightsGroup", lambda *_: None)
    nodes = {"a": ("one", "one", "two"), "c": ("three",)}
    pools = {
        name: PlacedPool(name, cast("Any", None), tuple(Bundle(at, node) for at, node in enumerate(of_pool)), 0.5)
        for name, of_pool in nodes.items()
    }
    started: list[tuple[str, int, list[int]]] = []

    class Group(_Launched):
        def __init__(self, number: int) -> None:
            super().__init__("reward")
            self.number = number

        def __len__(self) -> int:
            return self.number

        def extended_by(self, other: _Launched) -> Group:
            return Group(self.number + len(other))

    def start(
        role: str, make: object, pool: PlacedPool, bundles: Sequence[Bundle], first_rank: int = 0, **_: object
    ) -> Any:
        if role != "reward":
            return _Launched(role)
        started.append((pool.name, first_rank, [bundle.index for bundle in bundles]))
        return Group(len(bundles))

    spec = spec_of("CPU", [])
    reward = RewardSpec(function=RewardFunction(module="r", num_workers=6))
    placement = spec.placement.model_copy(update={"reward": ["a", "c"]})
    sized = [pool.model_copy(update={"gpus_per_node": len(nodes[pool.name])}) for pool in spec.pools]
    spec = spec.model_copy(update={"placement": placement, "reward": reward, "pools": sized})
    launcher = SimpleNamespace(start=start, none_of=lambda *_: Group(0))

    launched = groups.launch(spec, pools, cast("Any", launcher))

    assert started == [("a", 0, [0, 1, 2, 0]), ("c", 4, [0, 0])]
    assert launched.reward.function is not None
    assert len(launched.reward.function.group) == 6


async def test_each_copy_of_a_reward_model_is_checked_and_loaded(story: Story) -> None:
    models = {role: story.role(role) for role in ("reward_model", "reward_model_c")}
    made_here = replace(made(story, []), reward=cast("Any", SimpleNamespace(function=None, models=models)))
    spec = spec_of("CUDA", [])
    placement = spec.placement.model_copy(update={"reward": ["a", "c"]})
    spec = spec.model_copy(update={"placement": placement, "reward": RewardSpec(type=RewardType.MODEL)})

    await groups.make_ready(made_here, spec, Phases({}, 60.0))

    for role in models:
        assert story.told.index(f"{role} check") < story.told.index(f"{role} load")
    assert story.told.index("reward_model load") < story.told.index("rollout measures"), "it is on the engine's GPU"
