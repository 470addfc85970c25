"""The connection to Ray: the cluster that the operator created, or a local one for the duration of a run.

Called by `run`. It stops the Ray that it started. Ray's token authentication is set explicitly, because Ray 2.60 turns
it on by default and writes a token into the home folder.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import ray

from ppojob_api.v1alpha1.constants import POOL_RESOURCE_PREFIX
from ppojob_api.v1alpha1.runtime import Device
from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.worker_groups.errors import PoolNotPlacedError
from ppojob_trainer.worker_groups.survivors import NAMESPACE

__all__ = ["RayNotStartedError", "check_gpus", "connected", "local_resources"]

logger = logging.getLogger(__name__)

_STORE_BYTES_CPU = 1024**3
"""Size of the object store for a run on CPU, in bytes: batches are small, and the models need the memory."""


NUM_TRIES = 3
NUM_CPUS = 2


class RayNotStartedError(RuntimeError):
    """Ray could not be started or reached."""


@contextmanager
def connected(spec: PPOJobSpec) -> Iterator[None]:
    """Connect to the cluster that RAY_ADDRESS names, or start one on this machine with the resources of the pools.

    Raises:
        PoolNotPlacedError: this machine has fewer GPUs than the pools need.
        RayNotStartedError: Ray could not be started or reached.
    """
    if not os.environ.get("RAY_ADDRESS") and spec.device is Device.CUDA:
        # It loads CUDA's driver; in the operator's cluster the driver process has no GPU.
        import torch

        check_gpus(spec, torch.cuda.device_count())
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    # Processes that request no GPU see the node's. That is Ray's coming default, about which it would warn.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    handlers = _signal_handlers()
    _connect(spec)
    # Ray installs a handler for SIGTERM; this program needs its own for a graceful stop.
    for number, handler in handlers.items():
        signal.signal(number, handler)
    try:
        yield
    finally:
        ray.shutdown()


def _connect(spec: PPOJobSpec) -> None:
    # Ray gives its node 30 s to start, which a busy machine exceeds, and raises a bare Exception.
    for attempt in range(1, NUM_TRIES + 1):
        try:
            if os.environ.get("RAY_ADDRESS"):
                ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.WARNING)
            else:
                _start_here(spec)
            return
        except Exception as error:
            if attempt == NUM_TRIES:
                raise RayNotStartedError(
                    f"Ray could not be started or reached in {NUM_TRIES} tries: {error} Look into the newest "
                    "session's logs below Ray's temporary folder; is the machine overloaded or out of memory?"
                ) from error
            logger.warning("try %d of %d to connect to Ray failed: %s", attempt, NUM_TRIES, error)


def check_gpus(spec: PPOJobSpec, found: int) -> None:
    """Refuse pools that need more than the `found` GPUs of this machine. Ray itself does not check the number.

    Raises:
        PoolNotPlacedError: there are fewer; names the pools.
    """
    wanted = sum(pool.gpus for pool in spec.pools)
    if wanted > found:
        pools = ", ".join(f"pool {pool.name} {pool.gpus}" for pool in spec.pools)
        raise PoolNotPlacedError(
            f"the pools request {wanted} GPUs ({pools}), and this machine has {found}: lower nodes or gpusPerNode, put "
            "the roles into fewer pools, or set device: CPU. Check whether CUDA_VISIBLE_DEVICES hides GPUs"
        )


def local_resources(spec: PPOJobSpec) -> dict[str, float]:
    """Return the Ray resources that stand for the pools on one machine."""
    return {POOL_RESOURCE_PREFIX + pool.name: float(pool.gpus) for pool in spec.pools}


def _start_here(spec: PPOJobSpec) -> None:
    num_gpus = sum(pool.gpus for pool in spec.pools)
    is_cuda = spec.device is Device.CUDA
    ray.init(
        address="local",
        namespace=NAMESPACE,
        # Enough for the bundles; Ray also prestarts as many processes, and most roles cannot use them.
        num_cpus=NUM_CPUS,
        num_gpus=num_gpus if is_cuda else 0,
        resources=local_resources(spec),
        object_store_memory=None if is_cuda else _STORE_BYTES_CPU,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.WARNING,
    )


def _signal_handlers() -> dict[signal.Signals, signal._HANDLER]:
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    # None: the handler was not installed from Python, so it cannot be restored from here.
    return {number: handler for number, handler in handlers.items() if handler is not None}
