"""Which models' weights vLLM keeps as they come: only into those may they be copied."""

from __future__ import annotations

import pytest
from torch import nn

pytestmark = pytest.mark.slow


def model_with(**attributes: object) -> nn.Module:
    part = nn.Module()
    for name, value in attributes.items():
        setattr(part, name, value)
    return nn.Sequential(nn.Module(), part)


def test_plain_layers_keep_their_weights() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from ppojob_trainer.engines.vllm.worker_extension import keeps_weights_as_they_come

    assert keeps_weights_as_they_come(model_with(quant_method=UnquantizedLinearMethod()))


def test_what_vllm_works_on_after_loading_is_not_kept() -> None:
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    from ppojob_trainer.engines.vllm.worker_extension import keeps_weights_as_they_come

    class Quantized(UnquantizedLinearMethod):
        pass

    assert not keeps_weights_as_they_come(model_with(quant_method=Quantized()))
    assert not keeps_weights_as_they_come(model_with(process_weights_after_loading=lambda dtype: None))
