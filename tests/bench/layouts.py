"""The placements and schedules that the benchmark knows, by name.

    colocated, colocated-N        all roles in one pool of all GPUs (of N), Serial; also colocated-auto, with mode Auto
    rollout-apart                 the rollout in a pool of half the GPUs, all other roles in the other half, Overlapped;
                                  also rollout-apart-serial, and rollout-apart-one-step-off with truncated importance
                                  sampling, and -N for maxStaleness N. For algorithms without a critic
    split-overlapped              actor and rollout | critic, reference and reward, in halves; also split-serial and
                                  split-parallel-update
    A+C                           the same, Overlapped, with A and C GPUs: 1+1, 2+1, 1+2, 3+1, 2+2; also A+C-serial and
                                  A+C-parallel-update
    A+C-without-OVERLAP           the same, Overlapped without one overlap, to measure what it is worth: values,
                                  reference, next-generation, weight-sync (which takes next-generation with it),
                                  streaming, old-log-prob; also split-without-OVERLAP
    A+C-shared                    the same, Overlapped, the critic's pool shared with the rollout; also split-shared
    A+C-ref-in-both               the same, Overlapped, the reference in both pools; also split-ref-in-both
    rollout-alone, ref-alone      that role in a separate pool, from three GPUs on
    reward-alone                  a reward model in a separate pool, from three GPUs on

Called by `bench_split`.
"""

from __future__ import annotations

import re
from typing import Any

from ppojob_api.v1alpha1.training import Overlap

_SERIAL: dict[str, Any] = {"mode": "Serial"}
_OVERLAPPED: dict[str, Any] = {"mode": "Overlapped"}
_SCHEDULES: dict[str, dict[str, Any]] = {
    "-serial": _SERIAL,
    "-parallel-update": {"mode": "ParallelUpdate"},
    "-overlapped": _OVERLAPPED,
    **{
        f"-without-{re.sub('(?<=[a-z])(?=[A-Z])', '-', overlap).lower()}": {
            **_OVERLAPPED,
            "disabledOverlaps": [overlap.value],
        }
        for overlap in Overlap
    },
}
_SHARED, _REF_IN_BOTH = "-shared", "-ref-in-both"
_SUFFIX = "|".join([*_SCHEDULES, _SHARED, _REF_IN_BOTH])
_SPLIT = re.compile(rf"(?P<actor>[1-9]\d*)\+(?P<critic>[1-9]\d*)(?P<schedule>{_SUFFIX}|)")
_HALVES = re.compile(rf"split(?P<schedule>{_SUFFIX})")
_COLOCATED = re.compile(r"colocated(-(?P<gpus>[1-9]\d*))?(?P<auto>-auto)?")
_APART = re.compile(r"rollout-apart((?P<serial>-serial)|(?P<off>-one-step-off(-(?P<staleness>[1-4]))?))?")
_ALONE = ("rollout", "ref", "reward")

Layout = dict[str, Any]
"""Sections of a spec: pools, placement, schedule, and what else the layout needs."""


def layouts(num_gpus: int) -> dict[str, Layout]:
    """Return the layouts that make sense on so many GPUs; each has all of them."""
    names = ["colocated"]
    if num_gpus > 1:
        names += ["split-serial", "split-parallel-update", "split-overlapped", "split-shared"]
    if num_gpus > 2:
        halves = (num_gpus + 1) // 2
        names += [f"{actor}+{num_gpus - actor}" for actor in range(num_gpus - 1, 0, -1) if actor != halves]
        names += [f"{role}-alone" for role in _ALONE]
    return {name: layout(name, num_gpus) for name in names}


def layout(name: str, num_gpus: int) -> Layout:
    """Return the layout of a name.

    Raises:
        ValueError: there is no such name, or it needs more GPUs than there are.
    """
    found = _find(name, num_gpus)
    wanted = sum(pool["gpusPerNode"] for pool in found["pools"])
    if wanted > num_gpus:
        raise ValueError(f"layout {name} needs {wanted} GPUs, and there are {num_gpus}: see --gpus")
    return found


def _find(name: str, num_gpus: int) -> Layout:
    if match := _COLOCATED.fullmatch(name):
        schedule = {"mode": "Auto"} if match["auto"] else _SERIAL
        return _layout({"all": int(match["gpus"] or num_gpus)}, {"actor": "all"}, schedule)
    if num_gpus > 1 and (match := _APART.fullmatch(name)):
        trainer = (num_gpus + 1) // 2
        placement = {"actor": "trainer", "rollout": ["rollout"]}
        pools = {"trainer": trainer, "rollout": num_gpus - trainer}
        if match["off"]:
            off = {"mode": "OneStepOff", "maxStaleness": int(match["staleness"] or 1)}
            return _layout(pools, placement, off) | {
                "algorithm": {"rolloutCorrection": {}},
                "rollout": {"logProbs": True},
            }
        return _layout(pools, placement, _SERIAL if match["serial"] else _OVERLAPPED)
    if match := _SPLIT.fullmatch(name):
        return _split(int(match["actor"]), int(match["critic"]), match["schedule"])
    if num_gpus > 1 and (match := _HALVES.fullmatch(name)):
        actor = (num_gpus + 1) // 2
        return _split(actor, num_gpus - actor, match["schedule"])
    role = name.removesuffix("-alone")
    if num_gpus > 2 and role != name and role in _ALONE:
        return _alone(role, num_gpus)
    raise ValueError(f"there is no layout {name} on {num_gpus} GPUs: take some of {', '.join(layouts(num_gpus))}")


def _split(actor: int, critic: int, suffix: str) -> Layout:
    both = ["actor", "critic"]
    shared = {_SHARED: {"rollout": both}, _REF_IN_BOTH: {"ref": both}}.get(suffix, {})
    return _layout({"actor": actor, "critic": critic}, shared, _SCHEDULES.get(suffix, _OVERLAPPED))


def _alone(role: str, num_gpus: int) -> Layout:
    """One role on a separate GPU, or the rollout on all that actor and critic leave, because it is the longest."""
    if role == "rollout":
        return _layout({"actor": 1, "critic": 1, role: num_gpus - 2}, {role: [role]}, _OVERLAPPED)
    found = _layout({"actor": num_gpus - 2, "critic": 1, role: 1}, {role: [role]}, _OVERLAPPED)
    # A reward function has no use for a GPU.
    return found | {"reward": {"type": "Both"}} if role == "reward" else found


def _layout(gpus: dict[str, int], placement: dict[str, Any], schedule: dict[str, Any]) -> Layout:
    resources = {"cpu": 8, "memory": "48Gi", "shm": "8Gi"}
    pools = [{"name": name, "gpusPerNode": number, "resourcesPerGPU": resources} for name, number in gpus.items()]
    split = {"actor": "actor", "rollout": ["actor"], "critic": "critic", "ref": ["critic"], "reward": ["critic"]}
    return {
        "pools": pools,
        "placement": {**(split if "critic" in gpus else {}), **placement},
        "schedule": schedule,
    }
