"""Which files of a repository or a prefix a model needs. Pure.

Weights are safetensors if there are any, else PyTorch's own; never both, nor the same weights in another layout
(`consolidated*`, `original/`, `onnx/`).
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

_TEXTS = (".json", ".txt", ".model", ".jinja", ".tiktoken", ".spm", ".vocab")
"""Endings of configurations, vocabularies, merges and chat templates."""
_TEMPLATES = "additional_chat_templates"
_OTHER_LAYOUT = "consolidated"
_INDEX = ".index.json"


def wanted(names: Iterable[str], *, with_code: bool) -> list[str]:
    """Return the files that a model needs; empty if there are no weights.

    Args:
        names: of all files, below the model's folder.
        with_code: its Python files too.
    """
    known = sorted(names)
    top = [name for name in known if "/" not in name and not name.startswith(_OTHER_LAYOUT)]
    weights = [name for name in top if name.endswith(".safetensors")]
    index = [name for name in top if name.endswith(f".safetensors{_INDEX}")]
    if not weights:
        weights = [name for name in top if name.startswith("pytorch_model") and name.endswith(".bin")]
        index = [name for name in top if name.endswith(f".bin{_INDEX}")]
    if not weights:
        return []
    texts = [name for name in top if name.endswith(_TEXTS) and not name.endswith(_INDEX)]
    templates = [name for name in known if PurePosixPath(name).parts[0] == _TEMPLATES]
    code = [name for name in known if with_code and name.endswith(".py")]
    return sorted({*weights, *index, *texts, *templates, *code})
