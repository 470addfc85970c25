"""A bucket in memory, for checkpoints and for exports."""

from __future__ import annotations

import pytest
from obstore.store import MemoryStore

from ppojob_trainer.checkpoints import bucket


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> MemoryStore:
    """The only bucket there is."""
    store = MemoryStore()
    monkeypatch.setattr(bucket, "from_url", lambda address, **options: store)
    return store
