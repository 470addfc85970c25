"""Bad PPOJobs with elastic pools; `bad_specs.py` has them beside all others."""

from typing import Any

from tests.good_spec import GOOD, BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


def _third(elastic: dict[str, Any], **changes: Any) -> dict[tuple[Step, ...], Any]:
    """Return a pool `spot` that generates beside the actor's, with these bounds."""
    pool = {"name": "spot", "gpusPerNode": 1, "elastic": elastic, **changes}
    return {_spec("pools"): [*GOOD["spec"]["pools"], pool], _spec("placement", "rollout"): ["actor", "spot"]}


_BOUNDS = {"minNodes": 1, "maxNodes": 4}

BAD_ELASTIC = (
    BadSpec("elastic bounds the wrong way round", _third({"minNodes": 3, "maxNodes": 2}),
            "spec.pools[2].elastic.minNodes", "is above maxNodes, which is 2: lower it, or raise maxNodes", shows="3"),
    BadSpec("elastic pool with a number of nodes", _third(_BOUNDS, nodes=2),
            "spec.pools[2].nodes", "between 1 and 4 pods (elastic): remove nodes", shows="2"),
    BadSpec("elastic pool with autoBalance's bounds", _third(_BOUNDS, minNodes=1),
            "spec.pools[2].elastic", "put them into elastic"),
    BadSpec("elastic pool of the critic", {**_third(_BOUNDS), _spec("placement", "critic"): "spot"},
            "spec.pools[2].elastic", "placement.critic must stay in the pool: use another pool there, or remove",
            shows="'spot'"),
    BadSpec("elastic pool of the reference", {**_third(_BOUNDS), _spec("placement", "ref"): ["critic", "spot"]},
            "spec.pools[2].elastic", "placement.ref must stay in the pool: use another pool there, or remove",
            shows="'spot'"),
    BadSpec("elastic pool of the reward",
            {**_third(_BOUNDS), _spec("placement", "reward"): ["critic", "spot"],
             _spec("reward", "function", "numWorkers"): 2},
            "spec.pools[2].elastic", "placement.reward must stay in the pool: use another pool there, or remove",
            shows="'spot'"),
    BadSpec("elastic pool of the actor", {_spec("pools", 0, "elastic"): _BOUNDS},
            "spec.pools[0].elastic", "placement.actor must stay in the pool", shows="'actor'"),
    BadSpec("elastic pool that does not generate",
            {**_third(_BOUNDS), _spec("placement", "rollout"): ["actor"]},
            "spec.pools[2].elastic", "name it in placement.rollout, or remove elastic", shows="'spot'"),
    BadSpec("no engine at the start",
            {**_third({"minNodes": 0, "maxNodes": 4}), _spec("placement", "rollout"): ["spot"]},
            "spec.pools[2].elastic.minNodes", "no pool would generate at the start: set it to 1 or more", shows="0"),
    BadSpec("engine over the nodes of an elastic pool",
            {**_third(_BOUNDS), _spec("rollout"): {"tensorParallelSize": 2}},
            "spec.rollout.tensorParallelSize", "an engine of an elastic pool has one node: use a divisor", shows="2"),
    BadSpec("engine over the CPU nodes of an elastic pool",
            {**_third(_BOUNDS), _spec("device"): "CPU", _spec("pools", 0, "nodes"): 2,
             _spec("rollout"): {"tensorParallelSize": 2}},
            "spec.rollout.tensorParallelSize", "elastic pool spot has one node: set it to 1", shows="2"),
    BadSpec("engine of two stages over the nodes of an elastic pool",
            {**_third(_BOUNDS), _spec("rollout"): {"pipelineParallelSize": 2}},
            "spec.rollout.pipelineParallelSize", "an engine of an elastic pool has one node: use a divisor", shows="2"),
    BadSpec("autoBalance with an elastic pool", {**_third(_BOUNDS), _spec("autoBalance"): {"enabled": True}},
            "spec.autoBalance.enabled", "spot is elastic", shows="True"),
)  # fmt: skip
