"""The diagrams of the documents, as SVG files that are committed: `docs/pictures/*.svg`.

`tools.site` writes and checks them. A browser needs no script and no other host to show them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tools.site import states
from tools.site.drawing import AMBER, BLUE, GREEN, GREY, PALE, PAPER, RED, VIOLET, Drawing


def overview() -> Drawing:
    """Return who talks to whom."""
    d = Drawing(960, 570, "You apply a PPOJob; the operator makes a RayCluster with one worker group per pool")
    d.box((20, 30), (190, 92), "You", ["ppojob.yaml", "kubectl, kubectl ppo"], BLUE)
    d.box((350, 30), (210, 92), "API server", ["PPOJob: spec, status", "RayCluster, Events"])
    d.box((710, 30), (230, 92), "PPOJob operator", ["two replicas, one leads", "reconciles every PPOJob"], VIOLET)
    d.box((350, 190), (210, 56), "KubeRay operator", ["creates the pods"])
    d.arrow((210, 76), (348, 76))
    d.text((279, 66), "kubectl apply", size=12, ink=GREY, anchor="middle")
    d.arrow((562, 76), (708, 76), has_two_heads=True)
    d.text((635, 58), "watches PPOJobs,", size=12, ink=GREY, anchor="middle")
    d.text((635, 96), "applies RayCluster", size=12, ink=GREY, anchor="middle")
    d.arrow((455, 122), (455, 188))
    d.text((465, 160), "RayCluster", size=12, ink=GREY)
    d.box((20, 300), (920, 160), "RayCluster of the job, in the job's namespace", fill=PAPER)
    d.arrow((455, 246), (455, 298))
    d.box(
        (640, 340),
        (280, 100),
        "Head pod (no GPU)",
        ["trainer's controller: runs the step", "Ray's dashboard: starts the attempt", "/metrics for Prometheus"],
        AMBER,
    )
    d.box(
        (40, 340),
        (270, 100),
        "Pool actor: worker pods",
        ["actor: FSDP2 training", "rollout: vLLM generation", "2 GPUs, for example"],
        GREEN,
    )
    d.box(
        (340, 340),
        (270, 100),
        "Pool critic: worker pods",
        ["critic: FSDP2 training", "reference and reward model", "1 GPU, for example"],
        GREEN,
    )
    d.arrow((770, 122), (770, 338))
    d.text((762, 196), "starts", size=12, ink=GREY, anchor="end")
    d.text((762, 212), "an attempt", size=12, ink=GREY, anchor="end")
    d.arrow((850, 338), (850, 124), is_dashed=True)
    d.text((858, 196), "progress", size=12, ink=GREY)
    d.text((858, 212), "reports", size=12, ink=GREY)
    d.arrow((638, 390), (612, 390), has_two_heads=True)
    d.arrow((338, 390), (312, 390), has_two_heads=True)
    d.box(
        (20, 490),
        (920, 60),
        "Storage: a PersistentVolumeClaim that all pods mount",
        ["models and data are read from it; metrics, logs, checkpoints and the exported model are written to it"],
        PALE,
    )
    d.arrow((480, 460), (480, 488), has_two_heads=True)
    return d


_PHASES: Mapping[str, tuple[str, str]] = {
    "gen": ("generate", BLUE), "logp": ("log-probs", VIOLET), "val": ("values", AMBER), "ref": ("ref", PALE),
    "ua": ("update actor", GREEN), "uc": ("update critic", RED), "w": ("", GREY),
}  # fmt: skip
# Lanes of (phase, start, length), in units of a step's time that are only meant to compare the three.
_STEPS: tuple[tuple[str, tuple[tuple[str, tuple[tuple[str, float, float], ...]], ...]], ...] = (
    ("One pool for all roles: one phase after the other (Serial)", (
        ("all roles", (("gen", 0, 18), ("logp", 18, 6), ("val", 24, 6), ("ref", 30, 6), ("uc", 36, 13),
                       ("ua", 49, 15), ("w", 64, 2))),
    )),
    ("Two pools: phases of different pools run at the same time (Overlapped)", (
        ("actor", (("gen", 0, 26), ("logp", 26, 9), ("ua", 38, 22), ("w", 60, 2))),
        ("critic", (("val", 26, 7), ("ref", 33, 5), ("uc", 38, 18))),
    )),
    ("Two pools, and the critic's pool also generates (shared with the rollout)", (
        ("actor", (("gen", 0, 17), ("logp", 17, 9), ("ua", 29, 22), ("w", 51, 2))),
        ("critic", (("gen", 0, 17), ("val", 17, 7), ("ref", 24, 5), ("uc", 29, 18))),
    )),
)  # fmt: skip


def step() -> Drawing:
    """Return one step in time, in three placements."""
    d = Drawing(960, 386, "One PPO step in three placements: one pool, two pools, two pools with shared generation")
    y, unit, left = 34.0, 12.4, 110.0
    for title, lanes in _STEPS:
        d.text((20, y), title, is_bold=True)
        y += 12
        end = max(start + length for _, bars in lanes for _, start, length in bars)
        for pool, bars in lanes:
            d.text((left - 10, y + 20), pool, size=13, ink=GREY, anchor="end")
            for phase, start, length in bars:
                label, fill = _PHASES[phase]
                d.bar((left + start * unit, y), (length * unit, 30), label, fill)
            y += 34
        d.arrow((left + end * unit, y + 12), (left + end * unit, y))
        d.text((left + end * unit - 8, y + 16), "next step", size=12, ink=GREY, anchor="end")
        y += 46
    d.text((20, 376), "Time runs to the right; lengths are illustrative. The narrow grey bar sends the new weights to "
                      "the rollout engines.", size=12, ink=GREY)  # fmt: skip
    return d


def objects() -> Drawing:
    """Return what belongs to what: job, attempts, RayCluster, pools, roles."""
    d = Drawing(960, 330, "A PPOJob owns a RayCluster; its attempts run one after the other; pools hold roles")
    d.box((20, 120), (180, 92), "PPOJob", ["spec: what you want", "status: what happens"], BLUE)
    d.box((270, 30), (220, 75), "Attempt 0, 1, 2, ...", ["one run of the trainer;", "resumes from a checkpoint"], AMBER)
    d.box((270, 190), (220, 75), "RayCluster", ["one head pod,", "one worker group per pool"], VIOLET)
    d.box((540, 120), (170, 58), "Pool", ["nodes x gpusPerNode"], GREEN)
    d.box((540, 230), (170, 58), "Head pod", ["runs the trainer"], PALE)
    d.box((800, 80), (140, 130), "Roles", ["actor", "rollout", "critic", "ref", "reward", "workers"], PALE)
    d.arrow((200, 140), (268, 80))
    d.text((212, 92), "starts", size=12, ink=GREY, anchor="middle")
    d.arrow((200, 190), (268, 226))
    d.text((212, 232), "owns", size=12, ink=GREY, anchor="middle")
    d.arrow((380, 105), (380, 188), is_dashed=True)
    d.text((390, 150), "runs in", size=12, ink=GREY)
    d.arrow((490, 215), (538, 160))
    d.arrow((490, 240), (538, 258))
    d.arrow((710, 145), (798, 145))
    d.text((754, 136), "placement", size=12, ink=GREY, anchor="middle")
    return d


DIAGRAMS: Mapping[str, Callable[[], Drawing]] = {
    "overview": overview, "step": step, "objects": objects, "states": states.picture,
}  # fmt: skip
