"""Reloads weights into vLLM's own model in FP8, right and wrong. A separate process: an import of vLLM changes much.

`python -m tests.unit.trainer.engines.quantized_weights FOLDER` prints as JSON what the check said of each push.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
os.environ["VLLM_CPU_KVCACHE_SPACE"] = "1"

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader import get_model

from ppojob_api.v1alpha1.rollout import Quantization
from ppojob_trainer.engines.errors import EngineArgumentError, WeightSyncError
from ppojob_trainer.engines.rollout import quantized_read_back
from ppojob_trainer.engines.rollout.options import VLLM_QUANTIZATION
from ppojob_trainer.engines.rollout.quantized_read_back import check_gpu, quantized_layers, rounding_error
from tests.ports import server_port
from tests.unit.trainer.engines.kept_weights import stream_of
from tests.unit.trainer.engines.reloaded_weights import PASSED, breaking_off, worker_of

Layer = Any
LAYER = "model.layers.1.mlp.down_proj"


def nothing(layer: Layer) -> None:
    """Leave a layer as it is."""


def another_scale(layer: Layer) -> None:
    """As if the scale were that of another layer."""
    layer.weight_scale.data.mul_(1.3)


def another_bit(layer: Layer) -> None:
    """Change the least significant bit of one weight."""
    layer.weight.data.view(torch.uint8)[3, 5] ^= 1


DEFECTS: dict[str, tuple[Callable[[Layer], None], Callable[[Layer], None]]] = {
    "none": (nothing, nothing),
    "scale while it is rounded": (another_scale, nothing),
    "bit after it is rounded": (nothing, another_bit),
    "none again": (nothing, nothing),
}
"""What happens to one layer after vLLM rounded it, and after the reload."""


def outcome(worker: Any, weights: Iterable[tuple[str, Tensor]], defect: str) -> str:
    """Push, with something wrong; return what the check said."""
    while_rounded, after_reload = DEFECTS[defect]
    model, reload = worker.model_runner.get_model(), worker.model_runner.reload_weights
    layer: Layer = quantized_layers(model)[LAYER]
    process = type(layer.quant_method).process_weights_after_loading

    def processed(method: Any, one: Layer) -> None:
        process(method, one)
        if one is layer:
            while_rounded(one)

    def reloaded(weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        reload(weights_iterator=weights_iterator)
        after_reload(layer)

    worker.model_runner.reload_weights = reloaded
    type(layer.quant_method).process_weights_after_loading = processed
    try:
        with set_current_vllm_config(worker.vllm_config), torch.no_grad():
            done = worker._ppojob_load(7, stream_of(dict(weights)))
    except WeightSyncError as error:
        return str(error)
    finally:
        worker.model_runner.reload_weights = reload
        type(layer.quant_method).process_weights_after_loading = process
    assert done == (True, None)
    return PASSED


def changed_on_the_way(worker: Any, weights: list[tuple[str, Tensor]]) -> str:
    """Push, with one weight that changes between its arrival and vLLM's loader."""
    passing = quantized_read_back.QuantizedReadBack.passing

    def passing_wrongly(self: Any, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in passing(self, tensors):
            yield name, -tensor if name.endswith("1.self_attn.o_proj.weight") else tensor

    vars(quantized_read_back)["QuantizedReadBack"].passing = passing_wrongly
    try:
        return outcome(worker, weights, "none")
    finally:
        vars(quantized_read_back)["QuantizedReadBack"].passing = passing


def errors_of_rounding() -> dict[str, float]:
    """Return the error of weights rounded as E4M3 is, and of some that are not, as a share of what is allowed."""
    weight = torch.randn(64, 48, generator=torch.Generator().manual_seed(1)) * torch.logspace(-4, 0, 48)
    scale = weight.abs().amax(dim=1, keepdim=True) / 448
    rounded = (weight / scale).to(torch.float8_e4m3fn).t()
    padded = torch.zeros(64, 80).to(torch.float8_e4m3fn)
    padded[:48, :64] = rounded
    scales = torch.ones(80, 1)
    scales[:64] = scale
    other = weight.clone()
    other[7, 40] *= 1.2
    return {
        "rounded": float(rounding_error(weight, rounded, scale)),
        "padded": float(rounding_error(weight, padded, scales)),
        "other": float(rounding_error(other, rounded, scale)),
    }


def gpus() -> dict[str, str]:
    """Return what the check says of kinds of GPU: on the CPU, vLLM's platform is the only substitute here."""
    found = {}
    for name, capability in {"A100": 80, "L40S": 89, "H100": 90}.items():

        class Platform:
            is_cpu = staticmethod(lambda: False)
            get_device_name = staticmethod(lambda name=name: name)
            has_device_capability = staticmethod(lambda needed, capability=capability: capability >= needed)

        module = vars(quantized_read_back)
        own, module["current_platform"] = module["current_platform"], Platform
        try:
            check_gpu(Quantization.FP8)
            found[name] = PASSED
        except EngineArgumentError as error:
            found[name] = str(error)
        module["current_platform"] = own
    return found


def quantized_model(path: str) -> tuple[VllmConfig, nn.Module]:
    config = EngineArgs(
        model=path,
        dtype="bfloat16",
        quantization=VLLM_QUANTIZATION[Quantization.FP8],
        enforce_eager=True,
        max_model_len=64,
        skip_tokenizer_init=True,
    ).create_engine_config()
    with set_current_vllm_config(config):
        initialize_model_parallel()
        return config, get_model(vllm_config=config)


def main() -> None:
    torch.set_num_threads(1)
    init_distributed_environment(1, 0, f"tcp://127.0.0.1:{server_port()}", 0, "gloo")
    config, model = quantized_model(sys.argv[1])
    sent = [
        (name, -tensor.detach())
        for name, tensor in AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32).named_parameters()
    ]
    worker = worker_of(config, model)
    found = {
        "pushes": {defect: outcome(worker, sent, defect) for defect in DEFECTS},
        "changed on the way": changed_on_the_way(worker, sent),
        # Each layer of several tensors gets some of them, and those are wrong.
        "broken off": outcome(worker, breaking_off([(name, -tensor) for name, tensor in sent[::2]]), "none"),
        "none after a broken one": outcome(worker, sent, "none"),
        "rounding": errors_of_rounding(),
        "gpus": gpus(),
    }
    sys.stdout.write("FOUND " + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
