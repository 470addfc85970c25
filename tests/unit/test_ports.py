"""The ports that tests give to servers of other processes."""

from __future__ import annotations

import subprocess
import sys

from tests.ports import server_port

ANOTHER = """
import itertools, random, sys
from tests import ports
wanted = itertools.chain([int(sys.argv[1])], range(ports._FIRST, ports._LAST))
random.randint = lambda first, last: next(wanted)
print(ports.server_port())
"""
"""Tries the given port first."""


def test_a_process_gets_each_port_once() -> None:
    ports = [server_port() for _ in range(50)]

    assert len(set(ports)) == len(ports)


def test_a_port_that_a_process_has_got_is_given_to_no_other_one() -> None:
    port = server_port()

    done = subprocess.run([sys.executable, "-c", ANOTHER, str(port)], capture_output=True, text=True, check=True)

    assert int(done.stdout) != port
