"""`rollout.engineArgs` beside the vLLM that is installed: unknown names and wrong values are refused by name."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from ppojob_api.v1alpha1.engine_rules import RESERVED_ENGINE_ARGS
from ppojob_api.v1alpha1.rollout import MAX_TEMPERATURE, MIN_TEMPERATURE
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.speculative import SpeculativeSpec
from ppojob_trainer.engines.errors import EngineArgumentError
from ppojob_trainer.engines.rollout.options import SCHEDULER, RolloutOptions

# Loading vLLM takes many seconds.
pytestmark = pytest.mark.slow


def options(**engine_args: Any) -> RolloutOptions:
    return RolloutOptions(path="/models/m", device=Device.CPU, max_model_len=300, engine_args=engine_args)


@pytest.mark.parametrize(
    ("engine_args", "words"),
    [
        ({"block_sise": 32}, r"spec\.rollout\.engineArgs\.block_sise: vLLM .* has no such argument \(near: block_size"),
        ({"qqqqq": 1}, "near: none of a similar name"),
    ],
)
def test_an_argument_that_vllm_does_not_have_is_refused(engine_args: dict[str, Any], words: str) -> None:
    from ppojob_trainer.engines.rollout.vllm_arguments import checked_arguments

    with pytest.raises(EngineArgumentError, match=words):
        checked_arguments(options(**engine_args))


def test_a_known_argument_is_passed_on() -> None:
    from ppojob_trainer.engines.rollout.vllm_arguments import checked_arguments

    assert checked_arguments(options(block_size=32)).block_size == 32


def test_drafts_and_updates_in_flight_need_the_trainers_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    from ppojob_trainer.engines.rollout import vllm_arguments

    drafts = dataclasses.replace(options(), speculative=SpeculativeSpec())
    in_flight = dataclasses.replace(options(), updates_in_flight=True)
    assert vllm_arguments.checked_arguments(drafts).scheduler_cls == SCHEDULER
    assert vllm_arguments.checked_arguments(in_flight).scheduler_cls == SCHEDULER

    monkeypatch.setattr(vllm_arguments.vllm, "__version__", "0.99.0")
    assert vllm_arguments.checked_arguments(options()).scheduler_cls != SCHEDULER
    with pytest.raises(EngineArgumentError, match=r"spec\.schedule\.weightUpdates: 'InFlight': .* vLLM 0\.99\.0"):
        vllm_arguments.checked_arguments(in_flight)
    with pytest.raises(EngineArgumentError, match=r"spec\.rollout\.speculative: .* vLLM 0\.99\.0; remove it"):
        vllm_arguments.checked_arguments(drafts)


def test_every_reserved_argument_is_one_of_vllms() -> None:
    from vllm import AsyncEngineArgs

    known = {field.name for field in dataclasses.fields(AsyncEngineArgs)}

    assert sorted(RESERVED_ENGINE_ARGS.keys() - known) == []


def test_temperatures_of_a_job_are_those_that_vllm_takes_as_they_are() -> None:
    from vllm import SamplingParams
    from vllm.exceptions import VLLMValidationError

    taken = [SamplingParams(temperature=one).temperature for one in (MIN_TEMPERATURE, MAX_TEMPERATURE)]
    assert taken == [MIN_TEMPERATURE, MAX_TEMPERATURE]
    assert SamplingParams(temperature=0.9 * MIN_TEMPERATURE).temperature == MIN_TEMPERATURE
    with pytest.raises(VLLMValidationError, match="temperature must be"):
        SamplingParams(temperature=1.1 * MAX_TEMPERATURE)
