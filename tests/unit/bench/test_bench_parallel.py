"""What the comparison of layouts prints if it does not come to its end."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.bench import bench_parallel

ROW = {"seconds": [2.0], "mfu": 0.4, "peak_gb": 9.0, "grad_norm": 1.0}


@pytest.mark.parametrize("rows", [{"data-2": ROW}, {}])
def test_after_sigterm_the_table_of_the_finished_layouts_is_printed(
    rows: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        if rows:
            (tmp_path / "rank-0.json").write_text(json.dumps(rows))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(bench_parallel, "run_two_ranks", stopped)
    monkeypatch.setattr(bench_parallel.workload, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(sys, "argv", ["bench_parallel", "--output", str(tmp_path)])
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit, match="stopped by SIGTERM"):
            bench_parallel.main()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert ("data-2" in capsys.readouterr().out) is bool(rows)
    assert json.loads((tmp_path / "results.json").read_text()) == rows
