"""An exported model is served as it is: transformers and vLLM read its weights, tokenizer and chat template."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.trainer import serve_export
from tests.integration.trainer.separate_process import LIMIT_S, seen_by

pytestmark = [pytest.mark.slow, pytest.mark.timeout(LIMIT_S + 60)]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("served")


@pytest.fixture(scope="module")
def seen(root: Path) -> dict[str, Any]:
    return seen_by(serve_export.__name__, str(root), limit=LIMIT_S)


def test_a_chat_goes_through_the_jobs_template(seen: dict[str, Any]) -> None:
    assert (seen["transformers"]["prompt"], seen["vllm"]["prompt"]) == ("<6 * 7>:", "<6 * 7>:")


def test_both_write_the_same(seen: dict[str, Any]) -> None:
    assert seen["vllm"]["written"]
    assert seen["vllm"]["written"] == seen["transformers"]["written"]


@pytest.mark.usefixtures("seen")
def test_the_folder_has_what_a_server_reads_and_a_card(root: Path) -> None:
    names = {path.name for path in (root / "model").iterdir()}

    assert {"config.json", "generation_config.json", "tokenizer.json", "chat_template.jinja", "README.md"} <= names
    assert "LoRA adapters are merged" in (root / "model" / "README.md").read_text()
