"""Users' own workers: what is refused before anything starts, and what a hook's answer becomes. No Ray."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.workers import WorkerSpec
from ppojob_trainer.protocol import Meta
from ppojob_trainer.worker_groups.custom import UserWorkers
from ppojob_trainer.worker_groups.errors import HookFailedError, WorkerFailedError, WorkerImportError, WorkerLostError
from ppojob_trainer.worker_groups.launch import Launcher
from ppojob_trainer.worker_groups.partition import Share
from ppojob_trainer.worker_groups.placement import Bundle, PlacedPool
from ppojob_trainer.worker_groups.table import Rows, Table

FILE = """
from ppojob_trainer.protocol import DataProto
from ppojob_trainer.worker_groups.dispatch import Dispatch, register


class Shaper:
    def __init__(self, context, factor: float = 1.0):
        self.factor = factor

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def shape(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO)
    def judge(self, batch: DataProto) -> DataProto:
        return batch

    @register(dispatch=Dispatch.RANK_ZERO)
    def watch(self, batch: DataProto):
        return None

    @register(dispatch=Dispatch.ONE_TO_ALL)
    def tell(self, batch: DataProto):
        return {"a": 1.0}

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC, blocking=True)
    def blocks(self, batch: DataProto):
        return {}

    @register(dispatch=Dispatch.ALL_TO_ALL)
    def each(self, one):
        return None

    def plain(self, batch):
        return None
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "shaper.py"
    file.write_text(FILE)
    return file


def worker(file: Path, after: str = "Score", method: str = "shape", **changes: Any) -> WorkerSpec:
    raw = {
        "name": "shaper",
        "path": str(file),
        "className": "Shaper",
        "pool": "critic",
        "hooks": [{"after": after, "method": method}],
    }
    return WorkerSpec.model_validate({**raw, **changes})


def test_a_class_of_a_file_is_found_with_its_methods(path: Path) -> None:
    user = UserWorkers.of(worker(path, kwargs={"factor": 2.0}), 0)

    assert [method.__name__ for method in user.methods] == ["shape"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"className": "Shapers"}, r"workers\[2\] \(shaper\): .*shaper.py has no class 'Shapers'.*one of Shaper"),
        ({"method": "reshape"}, r"after Score: Shaper has no method 'reshape'; registered are .*shape"),
        ({"method": "plain"}, r"Shaper has no @register on its method 'plain'"),
        ({"method": "blocks"}, r"Shaper.blocks: register it with one of DP_COMPUTE_PROTO, .*, not blocking"),
        ({"method": "each"}, r"Shaper.each: register it with one of"),
        ({"after": "Step", "method": "judge"}, r"Shaper.judge returns columns"),
        ({"after": "Step"}, r"Shaper.shape returns columns, which nobody reads after Step"),
        ({"kwargs": {"scale": 1}}, r"cannot be called with a WorkerContext and the kwargs scale: .*'scale'"),
        ({"path": "/no/such.py"}, r"workers\[2\] \(shaper\).path '/no/such.py': there is no such file"),
        ({"path": None, "module": "no_such_module"}, r"No module named 'no_such_module'"),
    ],
)
def test_each_mistake_is_named_before_anything_starts(path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WorkerImportError, match=message):
        UserWorkers.of(worker(path, **changes), 2)


class FakeGroup:
    """Answers a call with the given answer, and records its arguments."""

    role = "shaper"

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.meta: dict[str, Any] = {}
        self.sent: Any = None

    def __len__(self) -> int:
        return 2

    @property
    def num_shards(self) -> int:
        """Both processes compute together."""
        return 1

    def over(self, partition: Any) -> FakeGroup:
        self.partition = partition
        return self

    def using(self, meta: dict[str, Any]) -> FakeGroup:
        self.meta = meta
        return self

    async def call(self, method: Any, sent: Any) -> Any:
        self.sent = sent
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def table_of(rows: int, metrics: dict[str, list[float]] | None = None) -> Table:
    # What stands for the reference is never fetched.
    table = Table.of_results(["a reference"], [Share(tuple(range(rows)))])  # type: ignore[list-item]
    return Table(table.sources, {}, metrics or {})


async def call(path: Path, answer: Any, after: str = "Score", method: str = "shape") -> tuple[Any, Any, FakeGroup]:
    group = FakeGroup(answer)
    (hook,) = UserWorkers.of(worker(path, after, method), 0).hooks(group)  # type: ignore[arg-type]
    table, metrics = await hook.call(table_of(3), 5)
    return table, metrics, group


async def test_columns_are_laid_over_the_batch_and_metrics_averaged(path: Path) -> None:
    table, metrics, group = await call(path, table_of(3, {"shaper/cut": [1.0, 2.0]}))

    assert [source.replaces for source in table.sources] == [False, True]
    assert metrics == {"shaper/cut": 1.5}
    assert group.meta == {Meta.GLOBAL_STEP: 5}
    assert [share.rows for share in group.partition] == [(0,), (1, 2)]


async def test_processes_that_compute_together_are_one_part(path: Path) -> None:
    _, _, group = await call(path, table_of(3), method="judge")

    assert [share.rows for share in group.partition] == [(0, 1, 2)]


def test_processes_of_a_process_group_do_not_share_a_gpu(tmp_path: Path) -> None:
    file = tmp_path / "judges.py"
    file.write_text(
        "from ppojob_trainer.worker_groups.dispatch import Dispatch, register\n"
        "from ppojob_trainer.worker_groups.mesh_worker import MeshWorker\n"
        "class Shaper(MeshWorker):\n"
        "    @register(dispatch=Dispatch.MESH_COMPUTE_PROTO)\n"
        "    def shape(self, batch): return batch\n"
    )
    user = UserWorkers.of(worker(file, usesGPU=True, numWorkers=4, tensorParallelSize=2), 1)
    pool = PlacedPool("judges", None, (Bundle(0, "node"), Bundle(1, "node")), 0.5)  # type: ignore[arg-type]

    with pytest.raises(
        WorkerImportError, match=r"workers\[1\] \(shaper\).numWorkers: 4: .* pool judges has 2: lower it"
    ):
        user.start(Launcher(tmp_path, 1.0), pool, {})


async def test_one_to_all_and_rank_zero_get_all_rows(path: Path) -> None:
    _, metrics, group = await call(path, [{"a": 1.0}, {"a": 3.0}, None], method="tell")
    assert metrics == {"a": 2.0}
    assert isinstance(group.sent, Rows)
    assert group.sent.meta == {Meta.GLOBAL_STEP: 5}
    table, metrics, _ = await call(path, None, after="Step", method="watch")
    assert metrics == {}
    assert len(table.sources) == 1


async def test_a_failure_names_worker_hook_and_method(path: Path) -> None:
    failure = WorkerFailedError("shaper rank 1 failed in shape: ZeroDivisionError: division by zero")
    with pytest.raises(
        HookFailedError, match=r"workers\[0\] \(shaper\), hook after Score, method shape: .*ZeroDivisionError"
    ) as caught:
        await call(path, failure)
    assert caught.value.__cause__ is failure


async def test_a_lost_process_keeps_its_name(path: Path) -> None:
    with pytest.raises(WorkerLostError):
        await call(path, WorkerLostError("shaper rank 0 was lost"))


@pytest.mark.parametrize(
    ("answer", "message"), [([3], "returned a int, wanted metrics"), ({"a": "b"}, "one of its metrics is not a number")]
)
async def test_an_answer_that_is_no_metrics_is_refused(path: Path, answer: Any, message: str) -> None:
    with pytest.raises(HookFailedError, match=message):
        await call(path, answer, method="tell")
