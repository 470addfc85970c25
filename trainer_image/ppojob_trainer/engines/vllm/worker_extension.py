"""The side of vLLM's worker process: it receives weights. vLLM mixes this class into its worker.

Called by `RolloutEngine` through `collective_rpc`. Names begin with `ppojob_`, because vLLM refuses an extension that
hides a method of the worker. It loads by `reload_weights`, which knows how vLLM laid a weight out (on the CPU it keeps
only packed copies, and `load_weights` finds empty parameters) and keeps addresses, so that CUDA graphs stay valid.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from vllm.config import VllmConfig, set_current_vllm_config

from ppojob_trainer.engines.transports import Transports
from ppojob_trainer.engines.weight_transfer import WeightLink, WeightReceiver


class WeightReceiverExtension:
    """See the module's docstring. The annotated attributes are the worker's."""

    vllm_config: VllmConfig
    device: torch.device
    rank: int
    model_runner: Any

    def ppojob_connect_weights(self, places: list[tuple[dict[str, Any], int]]) -> Transports:
        """Meet the sender, as `places` says of this worker: the link, and which receiver it is.

        Returns over what this worker passes weights on.
        """
        link, number = places[self.rank]
        self.ppojob_receiver = WeightReceiver(WeightLink(**link), number, self.device)
        return self.ppojob_receiver.transports()

    def ppojob_receive_weights(self, version: int) -> dict[str, Any]:
        """Load the next weights, which must be `version`; return the receipt as a dictionary."""
        stream = self.ppojob_receiver.begin(version)
        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=iter(stream))
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return asdict(stream.receipt())

    def ppojob_disconnect_weights(self) -> None:
        """Give the connection back."""
        receiver = self.__dict__.pop("ppojob_receiver", None)
        if receiver is not None:
            receiver.close()
