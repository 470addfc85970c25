"""What is refused before a model's weights and after a data file were downloaded.

It reuses the trainer's own checks: `engines.train.fsdp.families` and `data.sources`. It runs no code of a repository.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from ppojob_api.v1alpha1.engine import Engine
from ppojob_api.v1alpha1.sources import Source, SourceKind
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.commands.fetch.errors import FetchRefusedError
from ppojob_trainer.commands.fetch.listing import Listing
from ppojob_trainer.commands.fetch.model_files import wanted

CONFIG = "config.json"


def files_of(source: Source, listing: Listing) -> Listing:
    """Return the files of a listing that are fetched.

    Raises:
        FetchRefusedError: a model has no configuration or no weights.
    """
    if source.kind is not SourceKind.MODEL:
        return listing
    names = set(wanted((file.name for file in listing.files), with_code=source.with_code))
    if CONFIG not in names:
        there = ", ".join(sorted(file.name for file in listing.files)[:20]) or "nothing"
        raise FetchRefusedError(
            f"spec.{source.fields[0]} {source.address} is not a model in HuggingFace's format: it needs {CONFIG} and "
            f"*.safetensors or pytorch_model*.bin; there is {there}"
        )
    return Listing(listing.revision, tuple(file for file in listing.files if file.name in names))


def check_config(spec: PPOJobSpec, source: Source, folder: Path) -> None:
    """Refuse a model that the FSDP engine cannot read or compute, by its config.json alone. Of other engines nothing is
    known.

    Raises:
        FetchRefusedError: names the family and the setting.
    """
    # transformers takes seconds to import, and data needs none of it.
    from transformers import AutoConfig

    from ppojob_trainer.engines.errors import ModelUnsupportedError
    from ppojob_trainer.engines.train.fsdp.families import refuse_unsupported
    from ppojob_trainer.engines.train.model_fit import refuse_quantized

    if source.with_code and '"auto_map"' in (folder / CONFIG).read_text():
        # Only the trainer runs the code by which this configuration is understood.
        return
    engine_of = {
        "model.actor.path": spec.actor.engine,
        "model.ref.path": spec.actor.engine,
        "model.critic.path": spec.critic.engine,
    }
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True)
        if any(engine_of.get(field) is Engine.FSDP for field in source.fields):
            refuse_unsupported(config)
            refuse_quantized(config, "it")
    except (ModelUnsupportedError, OSError, ValueError, KeyError) as error:
        raise FetchRefusedError(f"spec.{source.fields[0]} {source.address}: {error}") from error


def check_data(spec: PPOJobSpec, fetched: Iterable[Source]) -> None:
    """Refuse data without the columns of the spec.

    Args:
        spec: with local paths.
        fetched: what is in the storage now.

    Raises:
        FetchRefusedError: names the field and the columns that are there.
    """
    # It loads torch.
    from ppojob_trainer.data.errors import DataError
    from ppojob_trainer.data.sources import check_columns

    fields = [field for each in fetched for field in each.fields]
    for place, source in spec.data.sources():
        if not any(field.startswith(f"{place}.") for field in fields):
            continue
        try:
            check_columns(source)
        except DataError as error:
            raise FetchRefusedError(f"spec.{place}: {error}") from error
