"""User-defined worker groups: the class that `spec.workers` names, and its methods at the points of a step.

    workers:
      - {name: shaper, path: /data/shaper.py, className: Shaper, pool: critic, numWorkers: 2,
         hooks: [{after: Score, method: shape}]}

A method is called as its `@register` says. It receives the current batch: with DP_COMPUTE_PROTO each process gets a
part of the rows; with MESH_COMPUTE_PROTO and DP_COMPUTE_METRIC too, but processes that compute together get the same
rows (tensorParallelSize, pipelineParallelSize), and the first of them answers; with ONE_TO_ALL every process gets all
rows; with RANK_ZERO the first process gets all rows. With `@register(reads=...)` only these columns are fetched, else
all. `meta_info` has the step (`Meta.GLOBAL_STEP`). DP_COMPUTE_PROTO and MESH_COMPUTE_PROTO return columns, which are
merged into the batch; the others return metrics or None. Processes that have no rows are not called. Called by `main`:
`UserWorkers.of` before any process is started, so that a typo costs seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ray.exceptions import ObjectLostError

from ppojob_api.v1alpha1.workers import Hook, HookPoint, WorkerSpec
from ppojob_trainer.engines.errors import RendezvousError
from ppojob_trainer.protocol import Meta
from ppojob_trainer.user_code import UserCodeError, check_call, find_class, import_user_code
from ppojob_trainer.worker_groups.communication import is_of_communication
from ppojob_trainer.worker_groups.dispatch import Dispatch, RemoteMethod, merge_metrics
from ppojob_trainer.worker_groups.errors import HookFailedError, WorkerFailedError, WorkerImportError
from ppojob_trainer.worker_groups.launch import Launcher
from ppojob_trainer.worker_groups.mesh_worker import MeshWorker
from ppojob_trainer.worker_groups.partition import Share, spread
from ppojob_trainer.worker_groups.placement import PlacedPool
from ppojob_trainer.worker_groups.table import Table
from ppojob_trainer.worker_groups.worker_group import WorkerGroup
from ppojob_trainer.worker_groups.worker_process import WorkerContext

__all__ = ["HookCall", "UserWorkers", "make_user_worker"]

Method = RemoteMethod[Any, Any, Any, Any, Any]

_MODES = (
    Dispatch.DP_COMPUTE_PROTO,
    Dispatch.MESH_COMPUTE_PROTO,
    Dispatch.DP_COMPUTE_METRIC,
    Dispatch.ONE_TO_ALL,
    Dispatch.RANK_ZERO,
)


@dataclass(frozen=True)
class UserWorkers:
    """A checked entry of `spec.workers`: its hooks, each with the method of the class.

    joins: the class is a `MeshWorker`, so its processes join a process group.
    """

    spec: WorkerSpec
    where: str
    methods: tuple[Method, ...]
    joins: bool = False

    @classmethod
    def of(cls, spec: WorkerSpec, index: int) -> UserWorkers:
        """Import the class and look up its methods.

        Raises:
            WorkerImportError: says which entry is wrong, why, and what to do.
        """
        where = f"workers[{index}] ({spec.name})"
        found = _user_class(spec, where)
        methods = tuple(_method(found, hook, where) for hook in spec.hooks)
        return cls(spec, where, methods, joins=issubclass(found, MeshWorker))

    def start(self, launcher: Launcher, pool: PlacedPool, environment: Mapping[str, str]) -> WorkerGroup[Any]:
        """Start the processes, spread over the pool's bundles, without waiting for them.

        Raises:
            WorkerImportError: two processes of a process group would share a GPU, which NCCL refuses.
        """
        number, num_gpus = self.spec.num_workers, len(pool.bundles)
        if self.joins and self.spec.uses_gpu and number > num_gpus:
            raise WorkerImportError(
                f"{self.where}.numWorkers: {number}: with usesGPU, each process of a MeshWorker needs its own GPU, and "
                f"pool {pool.name} has {num_gpus}: lower it, or enlarge the pool"
            )
        bundles = [pool.bundles[number % len(pool.bundles)] for number in range(self.spec.num_workers)]
        make = partial(make_user_worker, spec=self.spec, where=self.where)
        fraction = pool.gpu_fraction if self.spec.uses_gpu else 0.0
        group = launcher.start(self.spec.name, make, pool, bundles, gpu_fraction=fraction, environment=environment)
        return group.with_peers(self.spec.tensor_parallel_size, self.spec.pipeline_parallel_size)

    def hooks(self, group: WorkerGroup[Any]) -> list[HookCall]:
        """Return the calls of its hooks, in their order."""
        return [
            HookCall(group, method, hook.after, self)
            for hook, method in zip(self.spec.hooks, self.methods, strict=True)
        ]


def make_user_worker(context: WorkerContext, spec: WorkerSpec, where: str) -> Any:
    """Create the user's object in its process."""
    return _user_class(spec, where)(context, **spec.kwargs)


class HookCall:
    """A method at a point of the step; see `controller.ports.HookPort`."""

    def __init__(self, group: WorkerGroup[Any], method: Method, after: HookPoint, user: UserWorkers) -> None:
        self.after = after
        self._group = group
        self._method = method
        self._user = user

    @property
    def joins(self) -> bool:
        """Whether its processes must join a process group first."""
        return self._user.joins

    @property
    def worker(self) -> str:
        """Name of the worker group."""
        return self._group.role

    async def join(self) -> None:
        """Let the processes of a `MeshWorker` join their process group.

        Raises:
            HookFailedError: `joined` raised; names the worker.
            WorkerGroupError: a process was lost, or they did not meet.
        """
        spec = self._user.spec
        try:
            where = await self._group.call(MeshWorker.rendezvous)
            sizes = spec.pipeline_parallel_size, spec.tensor_parallel_size
            await self._group.call(MeshWorker.join, *where, *sizes, spec.uses_gpu)
        except WorkerFailedError as error:
            if _is_of_others(error):
                raise
            words = f"{self._user.where}: the processes could not join: {error}"
            raise HookFailedError(words).of(spec.name) from error

    async def call(self, batch: Table, step: int) -> tuple[Table, dict[str, float]]:
        """See `HookPort`.

        Raises:
            HookFailedError: the method raised or returned a wrong type; names worker and hook.
            WorkerGroupError: a process was lost, or its node ran out of memory.
        """
        try:
            answer = await self._send(batch, {Meta.GLOBAL_STEP: step})
        except WorkerFailedError as error:
            if self._user.joins and _is_of_others(error):
                raise
            raise self._failed(str(error)) from error
        if isinstance(answer, Table):
            means = {name: sum(values) / len(values) for name, values in answer.metrics.items() if values}
            return batch.replaced_by(answer), means
        return batch, self._metrics(answer)

    async def _send(self, batch: Table, meta: Mapping[str, Any]) -> Any:
        if self._method.dispatch.sends_rows:
            number = self._group.num_shards if self._method.dispatch.knows_peers else len(self._group)
            group = self._group.over(spread(len(batch), number)).using(meta)
            return await group.call(self._method, batch)
        everything = batch.rows(Share(tuple(range(len(batch)))), meta, self._method.reads)
        return await self._group.call(self._method, everything)

    def _metrics(self, answer: Any) -> dict[str, float]:
        answers: Sequence[Any] = answer if isinstance(answer, list) else [answer]
        for one in answers:
            if one is not None and not isinstance(one, Mapping):
                raise self._failed(f"it returned a {type(one).__name__}, wanted metrics (name -> number) or None")
        try:
            return merge_metrics([{str(k): float(v) for k, v in one.items()} for one in answers if one is not None])
        except (TypeError, ValueError) as error:
            raise self._failed(f"one of its metrics is not a number: {error}") from error

    def _failed(self, why: str) -> HookFailedError:
        where = f"{self._user.where}, hook after {self.after.value}, method {self._method.__name__}"
        return HookFailedError(f"{where}: {why}").of(self._user.spec.name)


def _is_of_others(error: WorkerFailedError) -> bool:
    """Return whether a method failed because it could not reach another process, which may be lost; see `explained`."""
    return isinstance(error.__cause__, ObjectLostError | RendezvousError) or is_of_communication(error.__cause__)


def _user_class(spec: WorkerSpec, where: str) -> type[Any]:
    try:
        module = import_user_code(where, spec.module, spec.path)
        found = find_class(module, spec.class_name, f"{where}.className", f"{where}: {spec.module or spec.path}")
        check_call(found, spec.kwargs, where, "a WorkerContext")
    except UserCodeError as error:
        raise WorkerImportError(str(error)) from error.__cause__
    return found


def _method(owner: type[Any], hook: Hook, where: str) -> Method:
    what = f"{where}, hook after {hook.after.value}: {owner.__name__}"
    # The class is the user's, so its method is known only by name.
    found = inspect.getattr_static(owner, hook.method, None)
    if not isinstance(found, RemoteMethod):
        registered = [name for name, value in inspect.getmembers_static(owner) if isinstance(value, RemoteMethod)]
        fault = "has no method" if found is None else "has no @register on its method"
        raise WorkerImportError(f"{what} {fault} {hook.method!r}; registered are {', '.join(registered) or 'none'}")
    if found.dispatch not in _MODES or found.blocking:
        modes = ", ".join(mode.name for mode in _MODES)
        raise WorkerImportError(f"{what}.{hook.method}: register it with one of {modes}, not blocking")
    if hook.after is HookPoint.STEP and found.dispatch.returns_rows:
        raise WorkerImportError(
            f"{what}.{hook.method} returns columns, which nobody reads after Step: register it with DP_COMPUTE_METRIC"
        )
    return found
