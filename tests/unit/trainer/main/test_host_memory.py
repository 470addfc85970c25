"""Host memory of offloaded state and of background saves, computed by hand, and which jobs are refused."""

import os
from pathlib import Path
from typing import Any

import pytest

from ppojob_api.v1alpha1.spec import PPOJobSpec
from ppojob_trainer.engines.errors import ModelMismatchError
from ppojob_trainer.engines.host import host_bytes
from ppojob_trainer.main.host_memory import host_needs, saves_in_background
from ppojob_trainer.worker_groups.roles.trained import ModelSize
from tests.unit.trainer.main.test_memory_fit import spec_of

GB = 10**9
OFFLOADED = {"offload": {"optimizer": True}}


def sizes(billions: float, host_gb: float, *hosts: str) -> dict[str, ModelSize]:
    roles = zip(("actor", "critic", "ref"), hosts or ("one",) * 3, strict=True)
    parameters = int(billions * GB)
    return {role: ModelSize(parameters, 141 * GB, host=host, host_bytes=int(host_gb * GB)) for role, host in roles}


def spec(*, is_asynchronous: bool = True, critic: dict[str, Any] | None = None, **actor: Any) -> PPOJobSpec:
    found = spec_of(2, **(actor or OFFLOADED))
    models = {"critic": found.model.critic.model_validate(critic or OFFLOADED)}
    checkpoint = found.checkpoint.model_copy(update={"asynchronous": is_asynchronous})
    return found.model_copy(update={"model": found.model.model_copy(update=models), "checkpoint": checkpoint})


def test_needs_by_hand() -> None:
    """1 B parameters: 4 GB of weights, 8 GB of moments; what is not offloaded is copied for a background save."""
    (actor, critic, ref) = host_needs(spec(critic={"offload": {"parameters": True}}), sizes(1, 64))["one"]

    assert (actor.offloaded, actor.staged, actor.num_processes) == (8 * GB, 4 * GB, 2)
    assert (critic.offloaded, critic.staged, critic.num_processes) == (4 * GB, 8 * GB, 1)
    assert (ref.offloaded, ref.staged) == (0, 0)
    (adapted, *_) = host_needs(spec(lora={"rank": 8}, offload={"parameters": True}), sizes(1, 64))["one"]
    assert (adapted.offloaded, adapted.staged) == (2 * GB, 0)


def test_a_node_holds_several_copies_of_a_model() -> None:
    whole = spec()
    hybrid = whole.model_copy(update={"actor": whole.actor.model_copy(update={"fsdp_size": 1})})

    (actor, *_) = host_needs(hybrid, sizes(1, 64))["one"]

    assert (actor.offloaded, actor.staged) == (16 * GB, 8 * GB)


@pytest.mark.parametrize(("nodes", "offloaded"), [(1, 8 * 1.2 * GB), (2, 8 * 0.7 * GB)])
def test_the_node_with_most_of_a_pipeline_is_counted(nodes: int, offloaded: float) -> None:
    """1 B parameters, of which 0.2 B are an embedding that both ends hold: one node has both stages, or the larger."""
    whole = spec()
    actor = whole.actor.model_copy(update={"pipeline_parallel_size": 2})
    pools = [whole.pools[0].model_copy(update={"nodes": nodes}), whole.pools[1]]
    stages = {"actor": ModelSize(GB, 80 * GB, host="one", host_bytes=GB, stages=(7 * GB // 10, GB // 2))}

    (found,) = host_needs(whole.model_copy(update={"actor": actor, "pools": pools}), stages)["one"]

    assert (found.offloaded, found.staged) == pytest.approx((offloaded, offloaded / 2))


def test_roles_on_separate_hosts_are_counted_separately() -> None:
    found = host_needs(spec(), sizes(1, 64, "a", "b", "b"))

    assert {host: [need.role for need in needs] for host, needs in found.items()} == {
        "a": ["actor"],
        "b": ["critic", "ref"],
    }


def test_without_room_for_the_copies_checkpoints_are_not_in_the_background() -> None:
    """7.6 B parameters: 122 GB are offloaded, 61 GB copied, and four processes take 16 GB: 198 GB."""
    assert saves_in_background(spec(), sizes(7.6, 252)) == (True, [])

    is_in_background, (warning,) = saves_in_background(spec(), sizes(7.6, 210))

    assert not is_in_background
    assert "host one has 210.0 GB, and about 198.4 GB would be needed" in warning
    assert "offloaded 121.6, copied for it 60.8" in warning
    assert saves_in_background(spec(is_asynchronous=False), sizes(7.6, 210)) == (False, [])


def test_a_host_that_cannot_hold_what_is_offloaded_is_refused_with_numbers() -> None:
    with pytest.raises(ModelMismatchError, match=r"host one .* has 120\.0 GB, and 121\.6 GB .* actor 60\.8, critic 60"):
        saves_in_background(spec(is_asynchronous=False), sizes(7.6, 120))


def test_a_pod_has_the_memory_of_its_limit(tmp_path: Path) -> None:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = tmp_path / "memory.max"
    assert host_bytes((limit,)) == total
    limit.write_text("max\n")
    assert host_bytes((limit,)) == total
    limit.write_text("123456\n")
    assert host_bytes((limit,)) == 123456
