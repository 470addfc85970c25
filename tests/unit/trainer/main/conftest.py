"""Fixtures of the driver."""

import pytest

from ppojob_api.v1alpha1.resolve import Reporting
from ppojob_trainer.main import monitor as monitor_module
from tests.unit.trainer.main.monitors import FakeReporter


@pytest.fixture
def reporter(monkeypatch: pytest.MonkeyPatch) -> FakeReporter:
    fake = FakeReporter(Reporting(url="https://operator"))
    monkeypatch.setattr(monitor_module, "ProgressReporter", lambda reporting: fake)
    return fake
