"""Makes Services' addresses work where there is no iptables: a process in the place of kube-proxy.

Each address lies on the pods' bridge, each port has a listener there, and each connection is carried to one of the
Service's ready endpoints. TCP only; started by `start` as `python -m tools.cluster.offline.service_proxy FOLDER`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.cluster.addresses import BRIDGE
from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.kubernetes import get_json
from tools.cluster.layout import Layout

INTERVAL_SECONDS = 1.0
CONNECT_LIMIT_SECONDS = 10.0
_CHUNK_BYTES = 1 << 16
_SERVICE_NAME = "kubernetes.io/service-name"

Address = tuple[str, int]
Routes = dict[Address, list[Address]]

logger = logging.getLogger(__name__)


def routes(services: Sequence[Mapping[str, Any]], slices: Sequence[Mapping[str, Any]]) -> Routes:
    """Where a connection to each Service's address and port may go; headless Services have no address."""
    found: Routes = {}
    for service in services:
        address = service["spec"].get("clusterIP", "None")
        if address in ("", "None"):
            continue
        key = (service["metadata"]["namespace"], service["metadata"]["name"])
        own = [item for item in slices if key == (item["metadata"]["namespace"], _service_of(item))]
        for port in service["spec"].get("ports", []):
            if port.get("protocol", "TCP") == "TCP":
                found[address, port["port"]] = _endpoints(own, port.get("name", ""))
    return found


def _service_of(endpoint_slice: Mapping[str, Any]) -> str:
    return str(endpoint_slice["metadata"].get("labels", {}).get(_SERVICE_NAME, ""))


def _endpoints(slices: Sequence[Mapping[str, Any]], port_name: str) -> list[Address]:
    return [
        (address, port["port"])
        for item in slices
        for port in item.get("ports") or []
        if (port.get("name") or "") == port_name
        for endpoint in item.get("endpoints") or []
        if endpoint.get("conditions", {}).get("ready", True)
        for address in endpoint["addresses"]
    ]


class ServiceProxy:
    """The listeners of all Services."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._routes: Routes = {}
        self._servers: dict[Address, asyncio.Server] = {}

    async def run(self) -> None:
        """Follow the cluster's Services for ever."""
        while True:
            try:
                found = await asyncio.to_thread(get_json, self._layout, "services,endpointslices", "--all-namespaces")
                await self._apply(found["items"])
            except ClusterError as error:
                logger.warning("%s", error)
            await asyncio.sleep(INTERVAL_SECONDS)

    async def _apply(self, items: Sequence[Mapping[str, Any]]) -> None:
        services = [item for item in items if item["kind"] == "Service"]
        self._routes = routes(services, [item for item in items if item["kind"] == "EndpointSlice"])
        for address in self._servers.keys() - self._routes.keys():
            self._servers.pop(address).close()
            logger.info("%s:%s is gone", *address)
        for address in self._routes.keys() - self._servers.keys():
            await self._listen(address)

    async def _listen(self, address: Address) -> None:
        host, port = address
        with contextlib.suppress(ClusterError):
            # It may be there already: of another port, or of an earlier process.
            run(["ip", "address", "add", f"{host}/32", "dev", BRIDGE], limit=10)
        self._servers[address] = await asyncio.start_server(
            lambda reader, writer: self._carry(address, reader, writer), host, port
        )
        logger.info("%s:%s leads to %s", host, port, self._routes[address])

    async def _carry(self, address: Address, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.closing(writer):
            endpoints = self._routes.get(address, [])
            if not endpoints:
                return
            endpoint = random.choice(endpoints)
            try:
                connection = asyncio.open_connection(*endpoint)
                far_reader, far_writer = await asyncio.wait_for(connection, CONNECT_LIMIT_SECONDS)
            except (OSError, TimeoutError) as error:
                logger.warning("%s:%s -> %s: %s", *address, endpoint, error)
                return
            with contextlib.closing(far_writer):
                await asyncio.gather(_copy(reader, far_writer), _copy(far_reader, writer))


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while chunk := await reader.read(_CHUNK_BYTES):
            writer.write(chunk)
            await writer.drain()
        writer.write_eof()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    folder = Path(sys.argv[1])
    asyncio.run(ServiceProxy(Layout(cache=folder / "cache", state=folder / "state")).run())
