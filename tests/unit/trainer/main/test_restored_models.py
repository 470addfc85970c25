"""Before the models are read from a checkpoint, the engines that share their GPUs release their memory."""

from types import SimpleNamespace
from typing import Any, cast

from ppojob_api.v1alpha1.resolve import resolve
from ppojob_api.v1alpha1.validation import parse_spec
from ppojob_trainer.checkpoints import Checkpoint
from ppojob_trainer.main.checkpoints import JobCheckpoints
from tests.good_spec import GOOD


class Recorded:
    """A group of processes that writes its calls into a list which it shares with the others."""

    def __init__(self, name: str, calls: list[str]) -> None:
        self._name, self._calls, self.group = name, calls, self

    async def sleep(self) -> None:
        self._calls.append(f"{self._name}: sleep")

    async def call(self, method: Any, location: str) -> None:
        self._calls.append(f"{self._name}: {method.__name__} {location}")


async def restored(found: Checkpoint | None) -> list[str]:
    calls: list[str] = []
    group = {name: Recorded(name, calls) for name in ("rollout", "rollout of the critic", "actor", "critic")}
    groups = SimpleNamespace(
        rollout=group["rollout"],
        shared={"rollout_critic": group["rollout of the critic"]},
        actor=group["actor"],
        critic=group["critic"],
    )
    spec = resolve(parse_spec(GOOD["spec"]))
    await JobCheckpoints(cast("Any", SimpleNamespace()), cast("Any", groups), spec, found).restore()
    return calls


async def test_engines_sleep_before_models_are_read() -> None:
    calls = await restored(Checkpoint(4, "/data/step-4", "uid"))
    assert calls[:2] == ["rollout: sleep", "rollout of the critic: sleep"]
    assert sorted(calls[2:]) == ["actor: restore /data/step-4/actor", "critic: restore /data/step-4/critic"]


async def test_engines_that_begin_with_the_models_of_the_job_stay_awake() -> None:
    assert await restored(None) == []
