"""Receives weights in vLLM's worker process. vLLM mixes this class into its worker.

Called by `RolloutEngine` through `collective_rpc`. Names begin with `ppojob_`, because vLLM refuses an extension that
hides a method of the worker. If vLLM keeps weights in the format of the checkpoint, they are copied in place. Otherwise
they are loaded with `reload_weights`, which takes six times as long but handles vLLM's own layouts (on the CPU it keeps
only packed copies, and `load_weights` finds empty parameters). Both keep addresses, so that CUDA graphs stay valid.
The numbers of reloaded weights are counted every time (`load_count`). On GPUs, weights are read back every few times
(`read_back`), reloaded ones unless vLLM's layout changes the sum of their bits. Weights that vLLM quantizes when it
loads them are reloaded, and read back in another way (`quantized_read_back`).
A worker of an engine of several GPUs asks the trainer for the boxes that its loaders read (`loader_reads`). It reads
nothing of the experts of others that divide them, nor of other stages' layers. So each returns what it did not read,
and the engine finds out what none of them read.
A partial push, of a model that is trained with adapters, brings some layers, each as a whole. A copy changes nothing
else, and vLLM's reload gives all layers without new weights back what they had.

Failures of the connection and of a push are returned, not raised: vLLM 0.32 stops to read the answers of an engine's
workers at the first one that failed, and would take the others' for answers to the next call.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace
from functools import partial, wraps
from typing import Any, ParamSpec, TypeAlias

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.attention.mla_attention import MLAAttention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod
from vllm.model_executor.model_loader.reload.layerwise import (
    LOADING_LAYERS,
    _place_kernel_tensors,
    get_layerwise_info,
)

from ppojob_trainer.engines.errors import WeightSyncError
from ppojob_trainer.engines.rollout.fused_experts import one_by_one
from ppojob_trainer.engines.rollout.load_count import Expected, counted_load
from ppojob_trainer.engines.rollout.loader_reads import LoaderReads
from ppojob_trainer.engines.rollout.options import HOST_ADDRESS, WORKER_ADDRESS, WORKER_FAILURE
from ppojob_trainer.engines.rollout.owner import end_with
from ppojob_trainer.engines.rollout.quantized_read_back import is_quantized, read_back_quantized
from ppojob_trainer.engines.rollout.read_back import ReadBack, bits_of, total_of
from ppojob_trainer.engines.rollout.routed_experts import record_experts
from ppojob_trainer.engines.rollout.seeded_verification import verify_by_seed
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.boxes import Box
from ppojob_trainer.engines.weights.plans import WeightLink
from ppojob_trainer.engines.weights.receipts import UNREAD
from ppojob_trainer.engines.weights.receiver import WeightReceiver, WeightStream

logger = logging.getLogger(__name__)

Boxes: TypeAlias = dict[str, tuple[Box, ...]]
P = ParamSpec("P")


def returns_failures(method: Callable[P, dict[str, Any]]) -> Callable[P, dict[str, Any]]:
    """Let a method return its error's message instead of raising it, as WORKER_FAILURE, with this node's address."""

    @wraps(method)
    def answered(*args: P.args, **kwargs: P.kwargs) -> dict[str, Any]:
        try:
            return method(*args, **kwargs)
        except Exception as error:
            logger.exception("%s failed", method.__name__)
            message = f"{error}" or type(error).__name__
            return {WORKER_FAILURE: message, WORKER_ADDRESS: os.environ.get(HOST_ADDRESS)}

    return answered


class WeightReceiverExtension:
    """See the module's docstring. The annotated attributes are the worker's."""

    vllm_config: VllmConfig
    device: torch.device
    rank: int
    model_runner: Any
    use_v2_model_runner: bool

    ppojob_read_back: ReadBack | None = None
    """The last complete push over the connection, if it was compared: partial ones bring only some of its tensors."""
    ppojob_keeps_bits: bool | None = None
    """Whether vLLM's layout of reloaded weights keeps the sum of their bits; None: no push has shown it yet."""
    ppojob_num_taken: int | None = None
    """The numbers that the loaders took of the first partial push over the connection."""

    def ppojob_end_with(self, owner: int) -> None:
        """End this process when the process with the number `owner` is gone, which is on the engine's first node.

        On another node it ends with its parent, the engine's process there.
        """
        end_with(owner if self.vllm_config.parallel_config.node_rank == 0 else os.getppid())

    def ppojob_verify_by_seed(self) -> None:
        """Check drafts so that a seed samples the same response with and without them."""
        verify_by_seed(self.model_runner, is_second_runner=self.use_v2_model_runner)

    def ppojob_record_experts(self) -> None:
        """Record the experts of each token where vLLM has no argument for it: in its first model runner."""
        if not self.use_v2_model_runner:
            record_experts(self.model_runner)

    def ppojob_allocate_stage_inputs(self) -> None:
        """Allocate the memory into which a stage on the CPU receives the results of the one before it.

        vLLM 0.32 does so when it warms up, which it leaves out on the CPU for a cache of given size.
        """
        if not get_pp_group().is_first_rank:
            runner = self.model_runner
            runner.intermediate_tensors = runner.get_model().make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=self.device
            )

    @returns_failures
    def ppojob_connect_weights(self, places: list[tuple[dict[str, Any], int]]) -> Transports:
        """Connect to the sender with this worker's entry of `places`: the link, and the receiver's number.

        An earlier connection is closed; it included an engine that was lost.

        Returns:
            The transports by which this worker passes weights on.
        """
        self.ppojob_disconnect_weights()
        link, number = places[self.rank]
        self.ppojob_receiver = WeightReceiver(WeightLink(**link), number, self.device)
        return self.ppojob_receiver.transports()

    @returns_failures
    def ppojob_receive_weights(self, version: int, keeps_weights: bool) -> dict[str, Any]:
        """Load the next weights, which must be `version`.

        Returns the receipt as a dictionary, with the names that the loaders did not read as `UNREAD`: of a compared
        load into a part of a model.

        A partial push is refused unless the engine has kept its weights since its last complete push. If loading fails,
        the rest of the push is received all the same, so that the other engines get theirs.
        """
        receiver = self.ppojob_receiver
        stream = receiver.begin(version, keeps_weights=keeps_weights)
        try:
            with set_current_vllm_config(self.vllm_config), torch.no_grad():
                is_read_back, boxes = self._ppojob_load(version, stream)
            if self.device.type == "cuda":
                torch.cuda.synchronize(self.device)
            receipt = stream.receipt()
        except BaseException as error:
            stream.drain(error)
            raise
        if boxes is not None:
            receiver.ask_for(boxes)
        unread = [name for name, read in (boxes or {}).items() if not read]
        return {**asdict(replace(receipt, is_read_back=is_read_back)), UNREAD: unread}

    def _ppojob_load(self, version: int, stream: WeightStream) -> tuple[bool, Boxes | None]:
        """Load weights.

        Returns:
            Whether they were read back and compared, and which boxes of them were read: of a compared load into a
            part of a model.
        """
        model, tensors = self.model_runner.get_model(), iter(stream)
        is_copied = self._ppojob_copies(model)
        load = model.load_weights if is_copied else partial(self._ppojob_reload, version, is_partial=stream.is_partial)
        if not stream.is_partial:
            self.ppojob_read_back = None
        if not stream.is_compared:
            load(tensors)
            return False, None
        if is_quantized(model):
            return self._ppojob_quantize(version, tensors)
        earlier = self.ppojob_read_back if stream.is_partial else None
        may_be_read = is_copied or (self.device.type == "cuda" and self.ppojob_keeps_bits is not False)
        is_read_back = may_be_read and (earlier is not None or not stream.is_partial)
        read_back, boxes = ReadBack(version, earlier), None
        if self._ppojob_is_whole():
            load(read_back.passing(tensors) if is_read_back else tensors)
        else:
            with LoaderReads(read_back.add if is_read_back else None) as reads:
                load(reads.passing(tensors))
            boxes, is_read_back = reads.boxes(), reads.are_exact(model) and is_read_back
        is_equal = is_read_back and (read_back.check(model) if is_copied else self._ppojob_compare(read_back, model))
        if not stream.is_partial:
            self.ppojob_read_back = read_back if is_equal else None
        return is_equal, boxes

    def _ppojob_compare(self, read_back: ReadBack, model: nn.Module) -> bool:
        """Compare reloaded weights with the model's parameters; return whether they are equal.

        The layouts of vLLM 0.32 for experts on GPUs move numbers and add zeros; its matrices for latent attention are a
        layer's numbers in another order. A layout that changes them would differ in the first push already: then these
        weights are not compared, but only counted.

        Raises:
            WeightSyncError: they differ, and those of an earlier push did not.
        """
        try:
            is_equal = read_back.check(model, check_latent_attention(model))
        except WeightSyncError as difference:
            if self.ppojob_keeps_bits:
                raise
            self.ppojob_keeps_bits = False
            logger.warning("vLLM's layout changes weights, so they are counted and not read back: %s", difference)
            return False
        self.ppojob_keeps_bits = is_equal or self.ppojob_keeps_bits
        return is_equal

    def _ppojob_copies(self, model: nn.Module) -> bool:
        """Whether weights are copied into the model's parameters, and need no reload."""
        return self.device.type == "cuda" and keeps_weights_as_they_come(model)

    def _ppojob_quantize(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> tuple[bool, Boxes | None]:
        """Have vLLM round weights to its format, and compare them; return what `_ppojob_load` returns.

        Each push must be complete: what is compared is that all layers were rounded in this push.
        """
        model = self.model_runner.get_model()
        with read_back_quantized(model, version) as read_back:
            if self._ppojob_is_whole():
                self._ppojob_reload(version, read_back.passing(tensors))
                return read_back.check(are_all_known=True), None
            with LoaderReads(lambda _, tensor: read_back.add(tensor)) as reads:
                self._ppojob_reload(version, reads.passing(tensors))
            return read_back.check(are_all_known=reads.are_exact(model)), reads.boxes()

    def _ppojob_reload(
        self, version: int, tensors: Iterator[tuple[str, torch.Tensor]], *, is_partial: bool = False
    ) -> None:
        """Load weights by vLLM's own means, and count them. After any error, the next complete push loads correctly."""
        model, is_on_cpu = self.model_runner.get_model(), self.device.type == "cpu"
        expected = Expected(self._ppojob_is_whole(), is_partial, self.ppojob_num_taken if is_partial else None)
        try:
            kernels = new_expert_kernels(model) if is_on_cpu else nullcontext()
            with kernels, counted_load(model, version, expected) as num_taken:
                self.model_runner.reload_weights(weights_iterator=one_by_one(model, tensors))
        except BaseException:
            abandon_reload(model)
            raise
        if is_partial:
            self.ppojob_num_taken = num_taken()
        if is_on_cpu:
            pack_tied_heads(model)

    def _ppojob_is_whole(self) -> bool:
        """Whether this process has the whole model, and not a stage, nor a part of each layer."""
        return self.vllm_config.parallel_config.world_size == 1

    def ppojob_disconnect_weights(self) -> None:
        """Close the connection."""
        receiver = self.__dict__.pop("ppojob_receiver", None)
        if receiver is not None:
            receiver.close()
        self.ppojob_read_back = self.ppojob_num_taken = None


def keeps_weights_as_they_come(model: nn.Module) -> bool:
    """Whether vLLM on CUDA leaves a model's weights unchanged after loading: no quantization, no experts, no MLA."""
    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(
        type(getattr(module, "quant_method", None)) in plain
        and (type(module) is Attention or not hasattr(module, "process_weights_after_loading"))
        for module in model.modules()
    )


def check_latent_attention(model: nn.Module) -> list[nn.Parameter]:
    """Compare the matrices of latent attention (MLA) with the layer that vLLM computes them from; return them.

    Raises:
        WeightSyncError: they have other numbers.
    """
    found: list[nn.Parameter] = []
    for layer in (module for module in model.modules() if isinstance(module, MLAAttention)):
        computed, source = list(layer.parameters(recurse=False)), layer.kv_b_proj.get_parameter("weight")
        if computed and total_of([bits_of(one.detach()) for one in computed]) != bits_of(source.detach()):
            raise WeightSyncError(
                f"vLLM computes {layer.layer_name} with other weights than {type(model).__name__} got for its kv_b_proj"
            )
        found += computed
    return found


def abandon_reload(model: nn.Module) -> None:
    """Drop what vLLM keeps of a reload that broke off, so that the next reload begins with empty layers.

    vLLM's state of a reload (`model_loader.reload`, vLLM 0.32) outlives the exception. Its next reload would add to the
    tensors of a half-filled layer and take the layer for complete too early: some loaders then fail, others drop the
    last tensors without a message. Layers get back the tensors that the kernels read, as in vLLM's own
    `finalize_layerwise_processing`. The model then has weights of two versions until it is reloaded.
    """
    if hasattr(model, "_original_do_torchao_reload"):
        model._do_torchao_reload = model._original_do_torchao_reload
    for layer in model.modules():
        info = get_layerwise_info(layer)
        # None: the layer is complete, or the reload broke off before it came to it.
        if info.kernel_tensors is not None:
            _place_kernel_tensors(layer, info)
        info.reset()  # type: ignore[no-untyped-call]
    LOADING_LAYERS.clear()


@contextmanager
def new_expert_kernels(model: nn.Module) -> Iterator[None]:
    """Have vLLM pack experts for the CPU again when they are reloaded in the block.

    vLLM 0.32 packs them only while a layer has no kernel. After a reload, the kernel would read unpacked weights as if
    they were packed, and compute other numbers. No CUDA graph holds a kernel on the CPU, so a new one may replace it.
    Experts that are not reloaded stay packed, and get their kernel back.
    """
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = {method: method.moe_kernel for method in methods if isinstance(method, UnquantizedFusedMoEMethod)}
    for method in kernels:
        method.moe_kernel = None
    try:
        yield
    finally:
        for method, kernel in kernels.items():
            if method.moe_kernel is None:
                method.moe_kernel = kernel


def pack_tied_heads(model: nn.Module) -> None:
    """Have vLLM pack the weights of the logits for the CPU again, if they are those of the embedding.

    vLLM 0.32 packs a layer when its own weights have been reloaded. A tied head has no separate weights, so it
    would continue to use its packed copy of the old embedding.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
