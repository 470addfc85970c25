"""Removes the chains and rules of our CNI network, and those of kube-proxy and the kubelet where they are ours.

Called by `leftovers` and `kube_router`; `ownership` says whose the KUBE- chains are. All other rules stay as they are.
The text of iptables-save goes in, the text for iptables-restore --noflush comes out: the whole removal is one step for
the kernel.
"""

from __future__ import annotations

import itertools
import re
import shutil
from collections.abc import Callable

from tools.cluster.addresses import CNI_NETWORK
from tools.cluster.command import run
from tools.cluster.errors import ClusterError

_PROGRAMS = ("iptables", "ip6tables")
_KUBERNETES_CHAIN = re.compile(r"^KUBE-")
_CNI_CHAIN = re.compile(r"^CNI-[0-9a-f]{24}$|^CNI-(HOSTPORT|DN)-")
_OUR_CNI_COMMENT = f'name: \\"{CNI_NETWORK}\\"'


def has_kubernetes_chains() -> bool:
    """True if the IPv4 or the IPv6 tables have a chain with a name of kube-proxy's or the kubelet's."""
    saved = (_save(program) for program in _PROGRAMS)
    return any(_KUBERNETES_CHAIN.match(chain) for text in saved for _, chains, _ in _tables(text) for chain in chains)


def has_chain(name: str) -> bool:
    """True if an IPv4 table has a chain of this name."""
    return any(name in chains for _, chains, _ in _tables(_save("iptables")))


def remove_cluster_rules(*, with_kubernetes_chains: bool) -> int:
    """Remove the cluster's rules from the IPv4 and IPv6 tables; return how many lines they had."""
    return _remove(lambda saved: removal_of_cluster_rules(saved, with_kubernetes_chains=with_kubernetes_chains))


def remove_chains(names: re.Pattern[str]) -> int:
    """Remove chains with matching names, and the jumps to them, from both; return how many lines they had."""
    return _remove(lambda saved: removal_of_chains(saved, names))


def _remove(removal_of: Callable[[str], tuple[str, int]]) -> int:
    count = 0
    for program in _PROGRAMS:
        removal, found = removal_of(_save(program))
        if found:
            run([f"{program}-restore", "--noflush", "--wait"], limit=120, stdin=removal)
        count += found
    return count


def _save(program: str) -> str:
    """The output of iptables-save; "" where there is no such program, or a kernel without such tables."""
    if shutil.which(f"{program}-save") is None:
        return ""
    try:
        return run([f"{program}-save"], limit=120)
    except ClusterError:
        return ""


def removal_of_cluster_rules(saved: str, *, with_kubernetes_chains: bool) -> tuple[str, int]:
    """From the output of iptables-save: the input of iptables-restore --noflush, and the number of lines that go."""

    def is_ours(chain: str, rules: list[str]) -> bool:
        is_kubernetes = with_kubernetes_chains and bool(_KUBERNETES_CHAIN.match(chain))
        return is_kubernetes or _is_of_our_network(chain, rules)

    return _removal(saved, is_ours)


def removal_of_chains(saved: str, names: re.Pattern[str]) -> tuple[str, int]:
    """As `removal_of_cluster_rules`, for the chains with matching names."""
    return _removal(saved, lambda chain, _: bool(names.match(chain)))


def _removal(saved: str, is_removed: Callable[[str, list[str]], bool]) -> tuple[str, int]:
    lines: list[str] = []
    found = 0
    for table, chains, rules in _tables(saved):
        ours = {chain for chain in chains if is_removed(chain, rules)}
        jumps = [rule for rule in rules if _chain_of(rule) not in ours and _mentions(rule, ours)]
        removed = [rule for rule in rules if _chain_of(rule) in ours]
        if not ours and not jumps:
            continue
        found += len(ours) + len(jumps) + len(removed)
        lines.append(f"*{table}")
        lines += [f"-D {rule.removeprefix('-A ')}" for rule in jumps]
        lines += [f"-F {chain}" for chain in sorted(ours)]
        lines += [f"-X {chain}" for chain in sorted(ours)]
        lines.append("COMMIT")
    return "\n".join([*lines, ""]), found


def _tables(saved: str) -> list[tuple[str, list[str], list[str]]]:
    tables: list[tuple[str, list[str], list[str]]] = []
    for line in saved.splitlines():
        if line.startswith("*"):
            tables.append((line[1:].strip(), [], []))
        elif line.startswith(":"):
            tables[-1][1].append(line[1:].split()[0])
        elif line.startswith("-A "):
            tables[-1][2].append(line)
    return tables


def _is_of_our_network(chain: str, rules: list[str]) -> bool:
    # Other programs' pods have CNI chains as well: ours carry the network's name in a comment.
    return bool(_CNI_CHAIN.match(chain)) and any(
        _OUR_CNI_COMMENT in rule for rule in rules if _mentions(rule, {chain}) or _chain_of(rule) == chain
    )


def _chain_of(rule: str) -> str:
    return rule.split()[1]


def _mentions(rule: str, chains: set[str]) -> bool:
    words = rule.split()
    return any(word in ("-j", "-g") and following in chains for word, following in itertools.pairwise(words))
