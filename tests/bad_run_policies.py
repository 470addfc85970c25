"""Bad PPOJobs with a mistake in their `runPolicy`; `bad_specs.py` has them beside all others."""

from tests.good_spec import BadSpec, Step


def _spec(*place: Step) -> tuple[Step, ...]:
    return ("spec", *place)


BAD_RUN_POLICIES = (
    BadSpec("negative retries", {_spec("runPolicy"): {"backoffLimit": -1}},
            "spec.runPolicy.backoffLimit", "greater than or equal to 0", shows="-1"),
    BadSpec("rule for an unknown reason",
            {_spec("runPolicy"): {"failurePolicy": {"rules": [{"reasons": ["Bored"], "action": "Fail"}]}}},
            "spec.runPolicy.failurePolicy.rules[0].reasons[0]", "'OutOfMemory'", shows="'Bored'"),
    BadSpec("rule for an unknown role",
            {_spec("runPolicy"): {"failurePolicy": {"rules": [{"roles": ["judge"], "action": "Fail"}]}}},
            "spec.runPolicy.failurePolicy.rules[0].roles[0]", "'workers'", shows="'judge'"),
    BadSpec("rule with an unknown action", {_spec("runPolicy"): {"failurePolicy": {"rules": [{"action": "Count"}]}}},
            "spec.runPolicy.failurePolicy.rules[0].action", "'Retry', 'Ignore' or 'Fail'", shows="'Count'"),
    BadSpec("rule without an action", {_spec("runPolicy"): {"failurePolicy": {"rules": [{"reasons": ["NodeLost"]}]}}},
            "spec.runPolicy.failurePolicy.rules[0].action", "this field is required"),
    BadSpec("rule for no reason",
            {_spec("runPolicy"): {"failurePolicy": {"rules": [{"reasons": [], "action": "Fail"}]}}},
            "spec.runPolicy.failurePolicy.rules[0].reasons", "at least 1 item"),
    BadSpec("rule for success",
            {_spec("runPolicy"): {"failurePolicy": {"rules": [{"exitCodes": [0], "action": "Fail"}]}}},
            "spec.runPolicy.failurePolicy.rules[0].exitCodes[0]", "greater than or equal to 1", shows="0"),
    BadSpec("no time for a graceful stop", {_spec("runPolicy"): {"stopGracePeriodSeconds": 0}},
            "spec.runPolicy.stopGracePeriodSeconds", "greater than or equal to 1", shows="0"),
    BadSpec("pool with Kueue's name for the head", {
                _spec("runPolicy"): {"queueName": "gpus"}, _spec("pools", 1, "name"): "head",
                _spec("placement", "critic"): "head"},
            "spec.pools[1].name", "rename the pool", shows="'head'"),
    BadSpec("priority without a queue", {_spec("runPolicy"): {"queuePriorityClass": "high"}},
            "spec.runPolicy.queuePriorityClass", "only with runPolicy.queueName", shows="'high'",
            server_refuses=False),
    BadSpec("gang scheduler's queue without it", {_spec("runPolicy"): {"gangSchedulerQueue": "team"}},
            "spec.runPolicy.gangSchedulerQueue", "set gangScheduler, or remove it", shows="'team'"),
    BadSpec("KAI without a queue", {_spec("runPolicy"): {"gangScheduler": "KAI"}},
            "spec.runPolicy.gangScheduler", "gangSchedulerQueue", shows="'KAI'"),
    BadSpec("queue without a name", {_spec("runPolicy"): {"queueName": ""}},
            "spec.runPolicy.queueName", "at least 1 character", shows="''"),
    BadSpec("a word for suspend", {_spec("runPolicy"): {"suspend": "yes"}},
            "spec.runPolicy.suspend", "valid boolean", shows="'yes'"),
)  # fmt: skip
