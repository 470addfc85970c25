"""The command line: `python -m tools.suite`, which `make test` calls. The exit code is 0 if every part passed."""

from __future__ import annotations

import signal
import sys

from tools.cluster.layout import Layout
from tools.suite.parts import run

if __name__ == "__main__":
    # If this process is ended, its parts must end as well.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    sys.exit(run(Layout.from_environment()))
