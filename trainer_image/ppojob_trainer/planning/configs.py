"""The configurations of a job's models, without their weights. Called by `plan`.

A folder needs only its config.json. For an address on the hub, the shape of a well-known model is used. It refuses
everything else: a plan of another shape would be wrong without a sign.
"""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PretrainedConfig

from ppojob_api.v1alpha1.sources import hub_address, is_address
from ppojob_trainer.engines.train.model_fit import read_config
from ppojob_trainer.planning.known_models import KNOWN_MODELS

__all__ = ["ShapeNotFoundError", "read_shape"]

_INSTRUCT = "-Instruct"


class ShapeNotFoundError(ValueError):
    """The configuration of a model is not on this machine, and its shape is not known."""


def read_shape(field: str, path: str, trust_remote_code: bool) -> PretrainedConfig:
    """Return the configuration of the model at a path or address.

    Args:
        field: that names the path, such as model.actor.path.

    Raises:
        ShapeNotFoundError: with the field, its value and what to do.
        ModelNotFoundError, ModelUnsupportedError: see `engines.train.model_fit.read_config`.
    """
    if not is_address(path):
        if not (Path(path) / "config.json").is_file():
            raise _unknown(field, path, "no config.json on this machine")
        return read_config(path, trust_remote_code=trust_remote_code)
    address = hub_address(path)
    name = "" if address is None else address.repository.removesuffix(_INSTRUCT)
    if name not in KNOWN_MODELS:
        raise _unknown(field, path, "an address that a plan does not fetch")
    config: PretrainedConfig = AutoConfig.for_model(**KNOWN_MODELS[name])
    config.name_or_path = path
    return config


def _unknown(field: str, path: str, what: str) -> ShapeNotFoundError:
    return ShapeNotFoundError(
        f"spec.{field}: {path}: {what}. Copy the model's config.json into a folder and add --set spec.{field}=FOLDER, "
        f"or use the shape of a known model, such as --set spec.{field}=hf://Qwen/Qwen2.5-7B. Known: "
        f"{', '.join(KNOWN_MODELS)}"
    )
