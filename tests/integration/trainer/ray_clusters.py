"""A real Ray of several nodes on this machine, beside any other Ray."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.cluster_utils import Cluster


def new_cluster(**head: Any) -> Any:
    """Start a Ray with a head node, which gets these arguments, and without a dashboard.

    Even without one, Ray tries to bind its port, 8265 unless another is set. With None, it looks for a free port.
    """
    arguments = {"include_dashboard": False, "dashboard_port": None, **head}
    return started(lambda: Cluster(initialize_head=True, head_node_args=arguments))  # type: ignore[no-untyped-call]


def started(start: Callable[[], Any]) -> Any:
    """Start a Ray node, once more where a busy machine took longer than the 30 s that Ray gives it."""
    try:
        return start()
    except Exception as error:
        # Ray raises a bare Exception here.
        if "timed out during startup" not in str(error):
            raise
        return start()
