"""A training engine of the user's own, named by path, trains actor, critic and reference through the real trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from ppojob_api.v1alpha1.constants import Reason
from ppojob_api.v1alpha1.progress import FailureKind
from ppojob_trainer.main import JobFailedError
from tests.integration.trainer.runs import SAME_MODEL, finish, spec_of

pytestmark = pytest.mark.timeout(1800)

ENGINE = {
    "path": str(Path("tests/plain_engine.py").absolute()),
    "className": "PlainEngine",
    "kwargs": {"num_threads": 1},
}


def own(model: Path, **engine: Any) -> dict[str, Any]:
    training = {"learningRate": 1e-3, "miniBatchSize": 4, "engine": "Class", "engineClass": {**ENGINE, **engine}}
    return spec_of(
        model, actor=training, critic=training, trainer={"totalSteps": 2, "validateEverySteps": 0}, checkpoint={}
    )


def test_it_trains_two_steps_and_its_weights_are_generated_with_and_exported(model: Path, tmp_path: Path) -> None:
    run = finish(tmp_path, own(model))

    for step in (1, 2):
        record = run.records[step]
        assert record["actor/grad_norm"] > 0
        assert record["critic/grad_norm"] > 0
        assert record["training/rollout_probs_diff_mean"] < SAME_MODEL
    # After the first update the policy has moved away from the reference.
    assert run.records[2]["actor/kl_loss"] > 0
    for role in ("actor", "critic"):
        assert [file.name for file in (tmp_path / "checkpoints" / "step-2" / role).iterdir()] == ["state.pt"]
    before, after = (load_file(folder / "model.safetensors") for folder in (model, tmp_path / "model"))
    assert before.keys() == after.keys()
    assert any(not before[name].to(after[name].dtype).equal(after[name]) for name in before)


@pytest.mark.long
def test_a_class_that_is_not_there_ends_the_run_before_models_are_loaded(model: Path, tmp_path: Path) -> None:
    with pytest.raises(JobFailedError, match=r"(actor|critic)\.engineClass: .* has no class 'Missing'") as failed:
        finish(tmp_path, own(model, className="Missing"))

    assert (failed.value.record.reason, failed.value.record.kind) == (Reason.INVALID_SPEC, FailureKind.PERMANENT)
