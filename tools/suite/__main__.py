"""The command line: `python -m tools.suite`, which `make test` calls. The exit code is 0 if every part passed."""

from __future__ import annotations

import sys

from tools.cluster.layout import Layout
from tools.suite.signals import end_parts_at_sigterm
from tools.suite.targets import run

if __name__ == "__main__":
    end_parts_at_sigterm()
    sys.exit(run(Layout.from_environment()))
