"""A GPU without memory: fake tensors, their live bytes, a fake process group, and the code that runs on CUDA.

Called by `role_memory`. The fake tensors are on the CPU, because PyTorch's backward pass on fake CUDA tensors needs
CUDA's driver. So `as_on_cuda` replaces the few functions that compute differently on CUDA. PyTorch's own `MemTracker`
gives the same bytes and takes seven times as long, because it copies the statistics of all modules.
"""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor, UntypedStorage
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.pipelining._utils import InferenceMode
from torch.distributed.pipelining.schedules import _PipelineSchedule
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from ppojob_trainer.engines.train import expert
from ppojob_trainer.engines.train.dims import ParallelDims
from ppojob_trainer.engines.train.fsdp import attention, expert_blocks, expert_gates, grouped_experts, layers, offload
from ppojob_trainer.engines.train.mesh import ParallelMesh, create_mesh, leave_process_group
from ppojob_trainer.maths import log_probs
from ppojob_trainer.planning.network import from_other_hosts
from ppojob_trainer.planning.work import Traffic

__all__ = ["LiveBytes", "as_on_cuda", "fake_ranks"]

_BLOCK: Final = 512
"""CUDA's allocator rounds sizes up to this many bytes."""
_COLLECTIVES: Final = ("c10d", "_c10d_functional")
_KINDS: Final = {
    "gather": ("allgather", "all_gather"),
    "reduce": ("reduce",),
    "pipeline": ("recv",),
}
"""Words in the names of operations, by the kind of traffic; all others are exchanges."""
_ANY_TIMEOUT: Final = timedelta(seconds=60)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the bytes of all tensors that are created inside it and still exist.

    now, peak: live bytes, and the most since `restart`. traffic: of this rank's collectives since `restart`, by
    kind. kinds: the kinds of traffic of some groups, by the groups' names; others are named after the
    operation.
    """

    def __init__(self, per_host: int | None = None) -> None:
        """`per_host`: ranks of a host; None: all."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = 0
        self.peak = 0
        self.traffic = Traffic()
        self._per_host = per_host
        self.kinds: dict[str, str] = {}
        self._sizes: dict[int, int] = {}
        self._is_on_host = False
        self._resize: Callable[[UntypedStorage, int], Any] = UntypedStorage.resize_

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Let torch.compile compile inside it. Otherwise torch would run the layers as they are."""
        return True

    def restart(self) -> None:
        """Begin a new peak and new sums of traffic."""
        self.peak = self.now
        self.traffic = Traffic()

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Do not count what is created in the block: it is in the host's memory."""
        self._is_on_host = True
        try:
            yield
        finally:
            self._is_on_host = False

    def __enter__(self) -> LiveBytes:
        """Count from here on. FSDP frees gathered parameters by resizing their storages."""

        def resize(storage: UntypedStorage, size: int) -> None:
            self._resize(storage, size)
            if storage._cdata in self._sizes:
                self._set(storage._cdata, size)

        UntypedStorage.resize_ = resize  # type: ignore[method-assign, assignment]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *error: Any) -> None:
        """Count no more."""
        UntypedStorage.resize_ = self._resize  # type: ignore[method-assign, assignment]
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation, and count the tensors that it returns."""
        found = operation(*args, **kwargs or {})
        for tensor in tree_iter(found):
            if isinstance(tensor, Tensor):
                self._add(tensor)
        if operation.namespace in _COLLECTIVES:
            self._receive(operation.__name__, args, found)
        return found

    def _add(self, tensor: Tensor) -> None:
        storage = (tensor._local_tensor if isinstance(tensor, DTensor) else tensor).untyped_storage()
        key = storage._cdata
        if key in self._sizes:
            return
        self._sizes[key] = 0
        weakref.finalize(storage, self._remove, key)
        if not self._is_on_host:
            self._set(key, storage.nbytes())

    def _set(self, key: int, size: int) -> None:
        rounded = -(-size // _BLOCK) * _BLOCK
        self.now += rounded - self._sizes[key]
        self._sizes[key] = rounded
        self.peak = max(self.peak, self.now)

    def _remove(self, key: int) -> None:
        self.now -= self._sizes.pop(key)

    def _receive(self, name: str, args: Any, result: Any) -> None:
        # Neither waiting for a message nor naming its gradient sends one.
        if "wait" in name or "wrap_tensor" in name or name.startswith("send"):
            return
        sizes = [tensor.nbytes for tensor in tree_iter((args, result)) if isinstance(tensor, Tensor)]
        kind = next((kind for kind, words in _KINDS.items() if any(word in name for word in words)), "exchange")
        group = _group_of(args)
        # Sums, such as those of log-probs, are not what the group is for.
        if not name.startswith("allreduce"):
            kind = self.kinds.get(group.group_name, kind)
        # Of a gather the result is the largest, of a reduction what is sent.
        size = max(sizes, default=0)
        self.traffic.received[kind] += size
        if self._per_host is not None:
            source = next((each for each in args if type(each) is int), None) if kind == "pipeline" else None
            ranks = dist.get_process_group_ranks(group)
            found = from_other_hosts(name, size, ranks, dist.get_rank(), self._per_host, source)
            self.traffic.from_other_hosts[kind] += round(found)


def _group_of(args: Sequence[Any]) -> dist.ProcessGroup:
    """Return the group that is among an operation's arguments, as an object or by its name."""
    # The name comes last: another one may be that of a reduction.
    for each in reversed(args):
        if isinstance(each, str):
            return _resolve_process_group(each)  # type: ignore[arg-type]
        if isinstance(each, torch.ScriptObject) and each._type().qualified_name().endswith(".ProcessGroup"):
            return dist.ProcessGroup.unbox(each)
    raise AssertionError(f"a collective has a group, and {args} has none")


@contextmanager
def fake_ranks(dims: ParallelDims, stage: int = 0) -> Iterator[ParallelMesh]:
    """Be the first rank of a pipeline stage in a process group whose collectives do nothing.

    Each rank of an expert-parallel group has as many tokens as this one, and all experts have equally many.
    """
    assert not dist.is_initialized(), "a plan needs a process without a process group"
    rank = stage * dims.of_stage
    dist.init_process_group("fake", rank=rank, world_size=dims.world_size, store=FakeStore())
    try:
        with (
            _replaced(_PipelineSchedule, "_warmup_p2p", _agree),
            _replaced(expert, "_read", _evenly),
            _replaced(expert_blocks, "_rows_of_all", _all_of_another),
        ):
            yield create_mesh(torch.device("cpu"), rank, dims, _ANY_TIMEOUT)
    finally:
        leave_process_group()


def _agree(_: Any, stages: Sequence[Any], *__: Any) -> None:
    """Stages ask each other whether all know the sizes of their messages, as ours do. Fake ranks do not answer."""
    for stage in stages:
        stage._inference_mode = InferenceMode.STATIC


class _AllRows(dict[str, tuple[int, int]]):
    """The rows of a rank that has all experts of every parameter."""

    def get(self, name: str, default: Any = None) -> Any:
        return 0, sys.maxsize


def _all_of_another(own: Mapping[str, Tensor]) -> list[dict[str, tuple[int, int]]]:
    """Have this rank receive all experts in blocks: a block takes as much memory on the rank that sends it."""
    return [{} if rank == dist.get_rank() else _AllRows() for rank in range(max(2, dist.get_world_size()))]


def _evenly(numbers: Tensor, num_tokens: int, per_token: int) -> list[list[int]]:
    """Divide tokens and rows over the ranks [3, ranks]: a token has experts on as many ranks as possible.

    The first rank, which is measured, gets no less than the others.
    """
    ranks = numbers.shape[1]
    each, more = divmod(num_tokens * min(per_token, ranks), ranks)
    sent = [each + (rank < more) for rank in range(ranks)]
    return [sent, sent[:1] * ranks, [-(-num_tokens * per_token // ranks)] * ranks]


@contextmanager
def as_on_cuda(live: LiveBytes) -> Iterator[None]:
    """Run attention, norms before experts, gates of experts, sums with adapters, the output layer and offload as they
    run on CUDA.

    Attention in one kernel; logits of a chunk in float32, and their gradient beside them.
    """
    with ExitStack() as replaced, warnings.catch_warnings():
        # Of a test for processors, in transformers' experts. A run on GPUs never reaches it.
        warnings.filterwarnings("ignore", "Dynamo detected a call to a `functools.lru_cache`-wrapped function")
        for module, name, function in (
            (attention, "_one_by_one", attention._varlen),
            (log_probs, "CHUNK_NUMBERS", log_probs.CHUNK_NUMBERS_CUDA),
            (log_probs, "_kernels", lambda _: _OutputKernels),
            (log_probs, "_product", _product),
            (offload, "_to_host", _on_host(live, offload._to_host)),
            (layers, "_rms_norm", _RMSNorm.apply),
            (grouped_experts, "_sum", lambda output, added: output.add_(added)),
            (expert_gates, "kernels", lambda _: _GateKernels),
        ):
            replaced.enter_context(_replaced(module, name, function))
        yield


class _RMSNorm(torch.autograd.Function):
    """The tensors of torch's kernel, which saves its input and a number of each token in float32."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.save_for_backward(hidden_states, weight, hidden_states.new_empty(hidden_states.shape[:-1]).float())
        return torch.empty_like(hidden_states)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        return torch.empty_like(gradients[0]), torch.empty_like(ctx.saved_tensors[1]), None


class _GateKernels:
    """Tensors as `fsdp.experts_cuda` allocates them."""

    @staticmethod
    def gate(products_SG: Tensor, *_: Any) -> Tensor:
        return products_SG.new_empty(len(products_SG), products_SG.shape[1] // 2)

    @staticmethod
    def gate_gradients(products_SG: Tensor, weights_S: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        return torch.empty_like(products_SG), torch.empty_like(weights_S)


class _OutputKernels:
    """Tensors as `maths.softmax_cuda` allocates them."""

    @staticmethod
    def statistics(logits_CV: Tensor, labels_C: Tensor, temperature: float) -> tuple[Tensor, ...]:
        return logits_CV.new_empty(3, len(logits_CV), dtype=torch.float32).unbind()

    @staticmethod
    def gradient(
        logits_CV: Tensor, labels_C: Tensor, statistics: Any, outer: Any, temperature: float, dtype: torch.dtype
    ) -> Tensor:
        return torch.empty_like(logits_CV, dtype=dtype)


def _product(left: Tensor, right: Tensor) -> Tensor:
    """Return the shape of a product whose sums are not rounded."""
    return left.new_empty(left.shape[0], right.shape[1], dtype=torch.float32)


def _on_host(live: LiveBytes, function: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    def moved(tensor: Tensor) -> Any:
        with live.on_host():
            return function(tensor)

    return moved


@contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)
