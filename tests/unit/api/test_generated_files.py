"""Generated files are what the models would write today, and the reference names every field."""

import subprocess
import sys

import yaml

from ppojob_api.v1alpha1.generate import outputs
from ppojob_api.v1alpha1.reference import field_reference


def test_generated_files_are_fresh() -> None:
    command = [sys.executable, "-m", "ppojob_api.v1alpha1.generate", "--check"]

    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)

    assert done.returncode == 0, done.stdout + done.stderr


def test_the_chart_has_the_same_crd_and_policy() -> None:
    texts = outputs()

    assert texts["crds/ppojobs.ppojob.dev.yaml"] == texts["charts/ppojob/files/crds/ppojobs.ppojob.dev.yaml"]
    assert texts["crds/ppojobs-policy.yaml"] == texts["charts/ppojob/files/policies/ppojobs-policy.yaml"]


def test_the_crd_has_no_aliases() -> None:
    text = outputs()["crds/ppojobs.ppojob.dev.yaml"]

    assert yaml.safe_load(text)["kind"] == "CustomResourceDefinition"
    assert "&id0" not in text


def test_the_reference_has_a_row_for_fields_at_every_depth() -> None:
    text = field_reference()

    assert (
        "| `spec.image` | string | required | Trainer image of all Ray pods: a name with a tag or a digest. |" in text
    )
    assert "| `spec.pools[].gpusPerNode` | integer ≥ 1 ≤ 64 | required |" in text
    assert "| `spec.rollout.temperature` | number ≥ 0.01 ≤ 2 | `1.0` |" in text
    assert "| `spec.device` | `CUDA`, `CPU` | `CUDA` |" in text
    assert "| `spec.pools[].resourcesPerGPU.memory` | quantity ≥ 0 | `64Gi` |" in text
    assert "`status.progress.firstValidationReward`" in text
