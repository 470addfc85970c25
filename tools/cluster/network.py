"""The pods' network on the host: the bridge with the node's address, and forwarding between it and the world.

Called by `up` before anything listens on the node's address; `leftovers` takes it away again.
"""

from __future__ import annotations

import json
from pathlib import Path

from tools.cluster.addresses import BRIDGE, CNI_NETWORK, NODE_IP, NODE_IP_WITH_PREFIX, POD_CIDR
from tools.cluster.command import run
from tools.cluster.errors import ClusterError
from tools.cluster.layout import Layout
from tools.cluster.templates import render_as

CNI_CONFIG = "10-ppojob.conflist"
CNI_CONFIG_ALONE = "10-ppojob-alone.conflist"
# Pods reach services on their own bridge only if bridged packets pass through iptables.
_IPTABLES_SETTINGS = {
    "net/ipv4/ip_forward": "is what carries the pods' packets to services and to the world",
    "net/bridge/bridge-nf-call-iptables": "makes services work between pods of one bridge (module br_netfilter)",
}


def ensure(layout: Layout, *, has_iptables: bool = True) -> None:
    """Create the bridge, its address, and the CNI configuration, where missing.

    Without iptables the pods reach one another and the node, and nothing beyond.

    Raises:
        ClusterError: the kernel lacks what the network needs, or the pods' subnet belongs to another interface.
    """
    for name, meaning in _IPTABLES_SETTINGS.items() if has_iptables else ():
        _enable(Path("/proc/sys") / name, meaning)
    holder = _interface_with(NODE_IP)
    if holder not in (None, BRIDGE):
        raise ClusterError(f"{NODE_IP} is the address of {holder}: another cluster uses {POD_CIDR}; take it down first")
    if not Path(f"/sys/class/net/{BRIDGE}").exists():
        run(["ip", "link", "add", BRIDGE, "type", "bridge"], limit=60)
    if holder is None:
        run(["ip", "address", "add", NODE_IP_WITH_PREFIX, "dev", BRIDGE], limit=60)
    run(["ip", "link", "set", BRIDGE, "up"], limit=60)
    template = CNI_CONFIG if has_iptables else CNI_CONFIG_ALONE
    render_as(layout, template, f"cni/{CNI_CONFIG}", network=CNI_NETWORK, bridge=BRIDGE, pod_cidr=POD_CIDR)


def _enable(setting: Path, meaning: str) -> None:
    if not setting.exists() and "bridge" in setting.name:
        run(["modprobe", "br_netfilter"], limit=60)
    try:
        if setting.read_text().strip() != "1":
            setting.write_text("1")
    except OSError as error:
        raise ClusterError(f"cannot set {setting} to 1 ({error.strerror}); it {meaning}") from error


def _interface_with(address: str) -> str | None:
    for interface in json.loads(run(["ip", "-json", "-4", "address", "show"], limit=60)):
        if any(item.get("local") == address for item in interface.get("addr_info", [])):
            return str(interface["ifname"])
    return None
