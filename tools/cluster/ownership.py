"""Remembers which of the traces that carry Kubernetes' own names are this cluster's. Called by `node` and `leftovers`.

Two traces have the same name on every machine: the KUBE- chains of iptables and the kubelet's device checkpoint.
`claim` runs before this cluster's kubelet starts, while no other Kubernetes runs, and records what exists:

- No KUBE- chains: those that appear from then on are this cluster's. Some: they cannot be distinguished, so all stay.
- A device checkpoint: it is kept, and put back when this cluster goes.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from tools.cluster.iptables import has_kubernetes_chains
from tools.cluster.layout import Layout
from tools.cluster.processes import boot_id

# Which devices pods have. It lies here wherever a kubelet's other files are, and the next kubelet would count those
# devices as its node's, and none of them as present.
DEVICE_CHECKPOINT = Path("/var/lib/kubelet/device-plugins/kubelet_internal_checkpoint")
_CHAINS = "chains-of-boot"
_KEPT_CHECKPOINT = "device-checkpoint"


def claim(layout: Layout) -> None:
    """Record what exists before this cluster's kubelet starts, and set an older device checkpoint aside."""
    layout.claims.mkdir(parents=True, exist_ok=True)
    if DEVICE_CHECKPOINT.is_file():
        shutil.move(DEVICE_CHECKPOINT, layout.claims / _KEPT_CHECKPOINT)
    # A reboot removes all chains, so the record is valid for this boot only.
    (layout.claims / _CHAINS).write_text("" if has_kubernetes_chains() else boot_id())


def owns_kubernetes_chains(layout: Layout) -> bool:
    """True if there was no KUBE- chain before this cluster's kubelet started."""
    note = layout.claims / _CHAINS
    return note.is_file() and note.read_text() == boot_id()


def release_device_checkpoint(layout: Layout) -> int:
    """Remove this cluster's device checkpoint and put back the one that was there before; return how many went."""
    if not layout.claims.is_dir():
        return 0
    was_there = DEVICE_CHECKPOINT.is_file()
    DEVICE_CHECKPOINT.unlink(missing_ok=True)
    kept = layout.claims / _KEPT_CHECKPOINT
    if kept.is_file():
        shutil.move(kept, DEVICE_CHECKPOINT)
    return int(was_there)
