"""Offloads parameters and optimizer moments to the host's memory while their role does not compute.

Called by the engine around each of its methods. Offloaded tensors stay the same objects: only their storage is
released and filled again, so neither FSDP2 nor the optimizer notices. The host's copies are pinned and kept (`pinned`),
so both directions run at the speed of PCIe. Moments arrive beside the first passes of an update, which uses them at
its first step. No value changes.

A checkpoint is written directly from the host's copies, in the background too. They change only at the end of an
update, which therefore waits until such a checkpoint is written. What is not offloaded is copied for one that is
written in the background.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from ppojob_api.v1alpha1.model import FrozenOffload, Offload
from ppojob_trainer.engines.train.fsdp.pinned import host_buffer

logger = logging.getLogger(__name__)


class Offloader:
    """Offloads a sharded module and its optimizer's moments; inside `on_device` they are on the device."""

    def __init__(
        self,
        module: nn.Module,
        offload: FrozenOffload,
        device: torch.device,
        adamw: torch.optim.Optimizer | None = None,
    ) -> None:
        """`offload` selects parameters, moments, or both."""
        self._module, self._device, self._adamw = module, device, adamw
        self._parameters = _OffloadedStorages(module.parameters) if offload.parameters else None
        wants_moments = isinstance(offload, Offload) and offload.optimizer
        self._moments = _OffloadedStorages(lambda: _moments(adamw)) if wants_moments and adamw is not None else None
        self._arriving: torch.cuda.Stream | None = None
        """On which the moments are copied to the device."""
        if self._moments is not None and device.type == "cuda":
            self._arriving = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._before_changes: Callable[[], None] | None = None
        self._buffers: dict[int, list[Tensor]] = {}
        self._prepared: Future[None] | None = None
        self._offload(self._chosen(moments=True), is_changed=True)

    @contextmanager
    def on_device(self, *, moments: bool = False, waits: bool = True) -> Iterator[None]:
        """Keep the parameters on the device inside the block.

        Args:
            moments: keep the optimizer's moments there too. Without them nothing may change and nothing is copied back.
            waits: let the block wait for the moments. Without, they arrive beside what it computes, and it calls
                `wait_for_moments` before it uses them.
        """
        if self._parameters is not None:
            self._parameters.load()
        if self._moments is not None and moments:
            self._moments.load(self._arriving)
        if waits:
            self.wait_for_moments()
        try:
            yield
        finally:
            self.wait_for_moments()
            self._offload(self._chosen(moments=moments), is_changed=moments)

    def wait_for_moments(self) -> None:
        """Let what the device computes from now on wait until the moments have arrived; the host does not wait."""
        if self._arriving is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._arriving)

    def wait_before_changes(self, wait: Callable[[], None]) -> None:
        """Call `wait`, once, before the host's copies change for the next time."""
        self._before_changes = wait

    def to_save(self, state: dict[str, Any]) -> dict[str, Any]:
        """Return a state whose offloaded tensors are the host's copies.

        A checkpoint is written without loading anything back, because another process, mostly vLLM, may use the
        device's memory by then.
        """
        placed: dict[str, Any] = tree_map_only(Tensor, self._staging().of_host, state)
        return placed

    def copying(self, state: dict[str, Any]) -> Callable[[], dict[str, Any]]:
        """Return a function for another thread, which returns `to_save` with copies of all tensors on the device.

        The copies are made beside the device's computation. Their memory is pinned and kept for the next call, which
        copies 20 GB in about a second.
        """
        staging, stream = self._staging(), None
        if self._device.type == "cuda":
            stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
            # What has been computed by now is copied.
            stream.wait_stream(torch.cuda.current_stream(self._device))

        def copy() -> dict[str, Any]:
            if self._prepared is not None:
                self._prepared.result()
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                copied: dict[str, Any] = tree_map_only(Tensor, staging.copy, state)
            if stream is not None:
                stream.synchronize()
            return copied

        return copy

    def prepare_copies(self) -> None:
        """Start to allocate, in a thread, the memory that the first function of `copying` would allocate.

        The system takes seconds to pin tens of GB, and the first update after a save would wait for it.
        """
        thread = ThreadPoolExecutor(1, "allocate copies")
        self._prepared = thread.submit(self._allocate, Counter(self._sizes_of_copies()))
        self._prepared.add_done_callback(_warn_if_failed)
        thread.shutdown(wait=False)

    def _sizes_of_copies(self) -> Iterator[int]:
        """Yield the bytes of each copy but those of single numbers; the moments need not exist yet."""
        copies_of_each = (self._parameters is None) + 2 * (self._moments is None)
        for parameter in self._module.parameters():
            if parameter.requires_grad and _local(parameter).nbytes:
                yield from [_local(parameter).nbytes] * copies_of_each

    def _allocate(self, sizes: Mapping[int, int]) -> None:
        is_pinned = self._device.type == "cuda"
        with torch.cuda.device(self._device) if is_pinned else nullcontext():
            for size, number in sizes.items():
                self._buffers[size] = [host_buffer(size, pinned=is_pinned) for _ in range(number)]

    def _staging(self) -> _Staging:
        chosen = self._chosen(moments=True)
        offloaded = {storage._cdata: copy for storages in chosen for storage, copy in storages.offloaded}
        return _Staging(offloaded, self._buffers)

    def _chosen(self, *, moments: bool) -> list[_OffloadedStorages]:
        found = (self._parameters, self._moments if moments else None)
        return [storages for storages in found if storages is not None]

    def _offload(self, chosen: list[_OffloadedStorages], *, is_changed: bool) -> None:
        if not chosen:
            return
        if is_changed and self._before_changes is not None:
            self._before_changes()
            self._before_changes = None
        for part in self._module.modules():
            if isinstance(part, FSDPModule):
                # Gathered parameters would stay on the device.
                part.reshard()
        for storages in chosen:
            storages.offload(is_changed=is_changed)
        if self._device.type == "cuda":
            # Other processes share the GPU, and the allocator would keep what was freed.
            torch.cuda.empty_cache()


def _warn_if_failed(prepared: Future[None]) -> None:
    if (error := prepared.exception()) is not None:
        logger.warning("no memory for checkpoints in the background, so the first one will fail: %s", error)


class _OffloadedStorages:
    """The storages of some tensors, which are moved to the host's memory and back."""

    def __init__(self, tensors: Callable[[], Iterable[Tensor]]) -> None:
        self._tensors = tensors
        self.offloaded: list[tuple[UntypedStorage, Tensor]] = []
        """Each storage that is released now, with the host's copy of its bytes."""
        self._loaded: list[tuple[UntypedStorage, Tensor]] = []
        self._copies: dict[int, Tensor] = {}

    def offload(self, *, is_changed: bool) -> None:
        """Release the storages, after a copy if they changed. Tensors added since the last call are included."""
        self.offloaded, self._loaded = self._copied() if is_changed else self._loaded, []
        for storage, _ in self.offloaded:
            storage.resize_(0)

    def _copied(self) -> list[tuple[UntypedStorage, Tensor]]:
        found: list[tuple[UntypedStorage, Tensor]] = []
        for number, storage in enumerate(_storages(self._tensors())):
            copy = self._copies.get(number)
            if copy is None or copy.numel() != storage.nbytes():
                copy = self._copies[number] = host_buffer(storage.nbytes(), pinned=storage.device.type == "cuda")
            copy.copy_(_bytes(storage), non_blocking=True)
            found.append((storage, copy))
        if found and found[0][0].device.type == "cuda":
            torch.cuda.synchronize(found[0][0].device)
        return found

    def load(self, stream: torch.cuda.Stream | None = None) -> None:
        """Fill the storages from the copies, on `stream` if there is one, else on the current one."""
        for storage, copy in self.offloaded:
            storage.resize_(copy.numel())
        if stream is not None:
            # What used this memory before was queued on the current stream.
            stream.wait_stream(torch.cuda.current_stream(stream.device))
        with nullcontext() if stream is None else torch.cuda.stream(stream):
            for storage, copy in self.offloaded:
                _bytes(storage).copy_(copy, non_blocking=True)
        self.offloaded, self._loaded = [], self.offloaded


class _Staging:
    """Replaces the tensors of a state by the tensors from which a checkpoint is written."""

    def __init__(self, copies: Mapping[int, Tensor], buffers: dict[int, list[Tensor]]) -> None:
        """
        Args:
            copies: the host's copies of offloaded storages.
            buffers: memory for `copy`, by bytes; used again, and extended.
        """
        self._copies, self._buffers = copies, buffers
        self._taken: Counter[int] = Counter()
        # Tied weights have two names in a state, and one copy.
        self._made: dict[tuple[Any, ...], Tensor] = {}

    def of_host(self, tensor: Tensor) -> Tensor:
        """Return an offloaded tensor as a view of the host's copy; any other unchanged."""
        local = _local(tensor)
        copy = self._copies.get(local.untyped_storage()._cdata)
        if copy is None:
            return tensor
        view = torch.empty(0, dtype=local.dtype).set_(
            copy.untyped_storage(), local.storage_offset(), local.shape, local.stride()
        )
        return _in_place_of(tensor, view)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return an offloaded tensor as a view of the host's copy; of any other a copy on the host."""
        found = self.of_host(tensor)
        if found is not tensor:
            return found
        local = _local(tensor)
        key = (local.untyped_storage()._cdata, local.storage_offset(), local.shape, local.stride())
        if key not in self._made:
            self._made[key] = self._copied(local)
        return _in_place_of(tensor, self._made[key])

    def _copied(self, local: Tensor) -> Tensor:
        size = local.nbytes
        if size == 0:
            return local.to("cpu", copy=True)
        of_size, number = self._buffers.setdefault(size, []), self._taken[size]
        self._taken[size] += 1
        if number == len(of_size):
            of_size.append(host_buffer(size, pinned=local.is_cuda))
        buffer = of_size[number]
        return buffer.view(local.dtype).view(local.shape).copy_(local, non_blocking=True)


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _in_place_of(tensor: Tensor, local: Tensor) -> Tensor:
    """Return what is local to this rank as `tensor` is: a part of a whole tensor, or the tensor itself."""
    if not isinstance(tensor, DTensor):
        return local
    # `from_local` would move it to the mesh's device; torch's own staging of checkpoints puts it in place like this.
    placed: Any = tensor.detach()
    placed._local_tensor = local
    return cast("Tensor", placed)


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Return each storage once; tied tensors share theirs, and a rank may have no part of a tensor."""
    storages = (_local(tensor).untyped_storage() for tensor in tensors)
    return list({storage.data_ptr(): storage for storage in storages if storage.nbytes()}.values())


def _bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _moments(adamw: torch.optim.Optimizer) -> Iterator[Tensor]:
    for state in adamw.state.values():
        # The number of the step is one float32, which AdamW's kernel reads where it is.
        yield from (value for value in state.values() if isinstance(value, Tensor) and value.dim() > 0)


def activations_on_host(*, is_enabled: bool) -> AbstractContextManager[object]:
    """Keep the tensors that a forward pass saves for backward in the host's pinned memory, if enabled.

    Like torch's `save_on_cpu`, which fails for DTensors: of those, this rank's part is kept.
    """
    return saved_tensors_hooks(_to_host, _from_host) if is_enabled else nullcontext()


@dataclass(frozen=True)
class _OnHost:
    """A saved tensor's copy in the host's memory; `of` restores the DTensor that it was a part of.

    The copy has the strides of the original, because compiled code relies on them.
    """

    copy: Tensor
    shape: torch.Size
    device: torch.device
    of: Callable[[Tensor], Tensor]


def _to_host(tensor: Tensor) -> _OnHost:
    local, of = tensor, _itself
    if isinstance(tensor, DTensor):
        local = tensor.to_local()
        of = partial(
            DTensor.from_local,
            device_mesh=tensor.device_mesh,
            placements=tensor.placements,
            run_check=False,
            shape=tensor.shape,
            stride=tensor.stride(),
        )
    # Of an expanded dimension there is one element.
    stored = local[tuple(slice(1) if stride == 0 else slice(None) for stride in local.stride())]
    copy = torch.empty_strided(stored.shape, stored.stride(), dtype=local.dtype, pin_memory=local.is_cuda)
    return _OnHost(copy.copy_(stored, non_blocking=local.is_cuda), local.shape, local.device, of)


def _from_host(saved: _OnHost) -> Tensor:
    copy = saved.copy
    local = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=saved.device)
    return saved.of(local.copy_(copy, non_blocking=copy.is_pinned()).expand(saved.shape))


def _itself(tensor: Tensor) -> Tensor:
    return tensor
