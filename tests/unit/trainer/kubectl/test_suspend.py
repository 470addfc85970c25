"""`kubectl ppo suspend` and `resume`: the write, and the message for a cluster that does not know the field."""

from collections.abc import Callable

import pytest
from typer.testing import Result

from tests.unit.trainer.kubectl.conftest import MemoryCluster, job

Plugin = Callable[..., Result]


@pytest.mark.parametrize(("command", "value"), [("suspend", True), ("resume", False)])
def test_the_field_is_written_and_the_job_waited_for(
    cluster: MemoryCluster, ppo: Plugin, command: str, value: bool
) -> None:
    cluster.patched = {**job(), "spec": {"runPolicy": {"suspend": value}}}

    result = ppo(command, "products", "--wait", "60")

    word = str(value).lower()
    patch, wait = cluster.commands
    assert patch[:4] == ("patch", "ppojobs.ppojob.dev", "products", "--type=merge")
    assert patch[4] == f'--patch={{"spec": {{"runPolicy": {{"suspend": {word}}}}}}}'
    assert wait[2:] == ("ppojobs.ppojob.dev/products", f"--for=condition=Suspended={word}", "--timeout=60s")
    assert result.stdout == f"team/products: spec.runPolicy.suspend is {word}\n"


def test_without_waiting_it_comes_back_at_once(cluster: MemoryCluster, ppo: Plugin) -> None:
    cluster.patched = {**job(), "spec": {"runPolicy": {"suspend": True}}}

    assert ppo("suspend", "products").exit_code == 0
    assert len(cluster.commands) == 1


def test_a_job_that_does_not_follow_in_time_gives_kubectls_exit_status(cluster: MemoryCluster, ppo: Plugin) -> None:
    cluster.patched = {**job(), "spec": {"runPolicy": {"suspend": True}}}
    cluster.exit_status = 1

    assert ppo("suspend", "products", "--wait", "1").exit_code == 1


def test_a_definition_without_the_field_is_an_error(cluster: MemoryCluster, ppo: Plugin) -> None:
    cluster.objects["ppojobs.ppojob.dev"] = [job()]

    result = ppo("suspend", "products")

    assert (result.exit_code, result.stderr) == (
        1,
        "error: the cluster's definition of PPOJob has no spec.runPolicy.suspend: upgrade its CRD\n",
    )
