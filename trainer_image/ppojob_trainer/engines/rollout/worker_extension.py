"""Receives weights in vLLM's worker process. vLLM mixes this class into its worker.

Called by `RolloutEngine` through `collective_rpc`. Names begin with `ppojob_`, because vLLM refuses an extension that
hides a method of the worker. If vLLM keeps weights in the format of the checkpoint, they are copied in place. Otherwise
they are loaded with `reload_weights`, which takes six times as long but handles vLLM's own layouts (on the CPU it keeps
only packed copies, and `load_weights` finds empty parameters). Both keep addresses, so that CUDA graphs stay valid.
Copied weights are read back every few times (`read_back`); of reloaded ones the numbers are counted (`load_count`).
Weights that vLLM quantizes when it loads them are reloaded, and read back every few times (`quantized_read_back`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any, Final

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.attention.attention import Attention
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

from ppojob_trainer.engines.rollout.load_count import counted_load
from ppojob_trainer.engines.rollout.quantized_read_back import is_quantized, read_back_quantized
from ppojob_trainer.engines.rollout.read_back import ReadBack
from ppojob_trainer.engines.rollout.routed_experts import record_experts
from ppojob_trainer.engines.rollout.seeded_verification import verify_by_seed
from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weights.transfer import WeightLink, WeightReceiver

READ_BACK_EVERY: Final = 10
"""vLLM's parameters are read back at the first push and at every tenth push after it."""


class WeightReceiverExtension:
    """See the module's docstring. The annotated attributes are the worker's."""

    vllm_config: VllmConfig
    device: torch.device
    rank: int
    model_runner: Any
    use_v2_model_runner: bool

    def ppojob_verify_by_seed(self) -> None:
        """Check drafts so that a seed samples the same response with and without them."""
        verify_by_seed(self.model_runner, is_second_runner=self.use_v2_model_runner)

    def ppojob_record_experts(self) -> None:
        """Record the experts of each token where vLLM has no argument for it: in its first model runner."""
        if not self.use_v2_model_runner:
            record_experts(self.model_runner)

    def ppojob_connect_weights(self, places: list[tuple[dict[str, Any], int]]) -> Transports:
        """Connect to the sender with this worker's entry of `places`: the link, and the receiver's number.

        An earlier connection is closed; it included an engine that was lost.

        Returns:
            The transports by which this worker passes weights on.
        """
        self.ppojob_disconnect_weights()
        link, number = places[self.rank]
        self.ppojob_receiver = WeightReceiver(WeightLink(**link), number, self.device)
        self.ppojob_num_pushes = 0
        return self.ppojob_receiver.transports()

    def ppojob_receive_weights(self, version: int) -> dict[str, Any]:
        """Load the next weights, which must be `version`; return the receipt as a dictionary."""
        stream, is_read_back = self.ppojob_receiver.begin(version), False
        model = self.model_runner.get_model()
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            if self.device.type == "cuda" and keeps_weights_as_they_come(model):
                is_read_back = self._ppojob_copy_in(version, iter(stream))
            elif is_quantized(model):
                is_read_back = self._ppojob_quantize(version, iter(stream))
            else:
                self._ppojob_reload(version, iter(stream))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return asdict(replace(stream.receipt(), is_read_back=is_read_back))

    def _ppojob_copy_in(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Copy weights into vLLM's model; return whether they were read back and compared."""
        model = self.model_runner.get_model()
        is_due = self._ppojob_is_due()
        if not (is_due and self._ppojob_is_whole()):
            model.load_weights(tensors)
            return False
        read_back = ReadBack(version)
        model.load_weights(read_back.passing(tensors))
        return read_back.check(model)

    def _ppojob_quantize(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> bool:
        """Have vLLM round weights to its format; return whether all of them were read back and compared."""
        if not self._ppojob_is_due():
            self._ppojob_reload(version, tensors)
            return False
        with read_back_quantized(self.model_runner.get_model(), version) as read_back:
            self._ppojob_reload(version, read_back.passing(tensors))
        return read_back.check(is_whole=self._ppojob_is_whole())

    def _ppojob_is_due(self) -> bool:
        """Count a push; return whether its weights are read back."""
        self.ppojob_num_pushes += 1
        return (self.ppojob_num_pushes - 1) % READ_BACK_EVERY == 0

    def _ppojob_reload(self, version: int, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Load weights by vLLM's own means, and count what was loaded."""
        model = self.model_runner.get_model()
        if self.device.type == "cpu":
            forget_expert_kernels(model)
        with counted_load(model, version, is_whole=self._ppojob_is_whole()):
            self.model_runner.reload_weights(weights_iterator=tensors)
        if self.device.type == "cpu":
            pack_tied_heads(model)

    def _ppojob_is_whole(self) -> bool:
        """Whether this process has the whole model. A tensor-parallel part has other sums."""
        return self.vllm_config.parallel_config.tensor_parallel_size == 1

    def ppojob_disconnect_weights(self) -> None:
        """Close the connection."""
        receiver = self.__dict__.pop("ppojob_receiver", None)
        if receiver is not None:
            receiver.close()


def keeps_weights_as_they_come(model: nn.Module) -> bool:
    """Whether vLLM on CUDA leaves a model's weights unchanged after loading: no quantization, no experts, no MLA."""
    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return all(
        type(getattr(module, "quant_method", None)) in plain
        and (type(module) is Attention or not hasattr(module, "process_weights_after_loading"))
        for module in model.modules()
    )


def forget_expert_kernels(model: nn.Module) -> None:
    """Have vLLM pack experts for the CPU again when they are reloaded.

    vLLM 0.32 packs them only while a layer has no kernel. After a reload, the kernel would read unpacked weights as if
    they were packed, and compute other numbers. No CUDA graph holds a kernel on the CPU, so a new one may replace it.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def pack_tied_heads(model: nn.Module) -> None:
    """Have vLLM pack the weights of the logits for the CPU again, if they are those of the embedding.

    vLLM 0.32 packs a layer when its own weights have been reloaded. A tied head has no separate weights, so it
    would continue to use its packed copy of the old embedding.
    """
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            method.process_weights_after_loading(module)
