"""Settings of PyTorch's allocator: the user's are kept, because torch forgets what it is not given again."""

from __future__ import annotations

import pytest
import torch

from ppojob_trainer.engines import allocator
from ppojob_trainer.engines.allocator import ordinary_segments, settings, use_expandable_segments

DIVISIONS = "roundup_power2_divisions:[256:1,512:2]"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("", "expandable_segments:True"),
        (f"max_split_size_mb:512, {DIVISIONS},", f"max_split_size_mb:512,{DIVISIONS},expandable_segments:True"),
        ("expandable_segments:False,max_split_size_mb:512", "expandable_segments:False,max_split_size_mb:512"),
    ],
)
def test_segments_are_expandable_unless_the_user_says_otherwise(given: str, wanted: str) -> None:
    assert settings(given, expandable=True) == wanted


def test_memory_that_is_shared_is_never_in_expandable_segments() -> None:
    given = f"{DIVISIONS},expandable_segments:True"
    assert settings(given, expandable=False) == f"{DIVISIONS},expandable_segments:False"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_a_block_changes_the_settings_and_restores_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", seen.append)
    monkeypatch.setattr(allocator, "_used", [])
    for variable in allocator.VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, "max_split_size_mb:512")

    with ordinary_segments():
        pass
    use_expandable_segments()
    with pytest.raises(RuntimeError), ordinary_segments():
        raise RuntimeError

    ordinary, own = "max_split_size_mb:512,expandable_segments:False", "max_split_size_mb:512"
    expandable = "max_split_size_mb:512,expandable_segments:True"
    assert seen == [ordinary, own, expandable, ordinary, expandable]


def test_torch_accepts_the_settings() -> None:
    try:
        torch._C._accelerator_setAllocatorSettings(settings(DIVISIONS, expandable=True))
    finally:
        torch._C._accelerator_setAllocatorSettings("")
