"""The sizes of the parallel axes: what divides what, which ranks are in a group, and what is refused."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.network import listen
from ppojob_trainer.engines.train.dims import ParallelDims, heads_and_context
from ppojob_trainer.engines.train.mesh import init_process_group


@pytest.mark.parametrize(
    ("sizes", "dims"),
    [
        ({}, ParallelDims(shard=8)),
        ({"tensor": 2}, ParallelDims(shard=4, tensor=2)),
        ({"sequence": 2}, ParallelDims(shard=4, sequence=2)),
        ({"sequence": 2, "tensor": 2}, ParallelDims(shard=2, sequence=2, tensor=2)),
        ({"sequence": 2, "context": 2}, ParallelDims(shard=2, sequence=2, context=2)),
        ({"context": 4, "tensor": 2}, ParallelDims(context=4, tensor=2)),
        ({"fsdp": 4, "sequence": 2, "context": 2}, ParallelDims(replicate=2, sequence=2, context=2)),
        ({"fsdp": 2}, ParallelDims(replicate=4, shard=2)),
        ({"fsdp": 1}, ParallelDims(replicate=8)),
        ({"fsdp": 4, "sequence": 2}, ParallelDims(replicate=2, shard=2, sequence=2)),
        ({"fsdp": 2, "sequence": 2, "tensor": 2}, ParallelDims(replicate=2, sequence=2, tensor=2)),
        ({"pipeline": 2}, ParallelDims(shard=4, pipeline=2)),
        ({"pipeline": 2, "fsdp": 2}, ParallelDims(replicate=2, shard=2, pipeline=2)),
        ({"pipeline": 4, "tensor": 2}, ParallelDims(tensor=2, pipeline=4)),
        ({"expert": 4}, ParallelDims(shard=8, expert=4)),
        ({"expert": 4, "fsdp": 4, "sequence": 2}, ParallelDims(replicate=2, shard=2, sequence=2, expert=4)),
        ({"expert": 2, "pipeline": 2}, ParallelDims(shard=4, pipeline=2, expert=2)),
        ({"pipeline": 2, "virtual": 3}, ParallelDims(shard=4, pipeline=2, virtual=3)),
    ],
)
def test_sizes_of_the_spec_become_axes(sizes: dict[str, int], dims: ParallelDims) -> None:
    assert ParallelDims.of(8, **sizes) == dims
    assert dims.world_size == 8


@pytest.mark.parametrize(
    ("sizes", "says"),
    [
        ({"tensor": 3}, "4 ranks are not divisible by sequence 1 x tensor 3"),
        ({"sequence": 2, "context": 2, "tensor": 2}, "4 ranks are not divisible by sequence 4 x tensor 2"),
        ({"fsdp": 2, "sequence": 2, "context": 2}, "cannot shard over 2 of 4 ranks .* use a multiple of 4 that"),
        ({"sequence": 4, "tensor": 2}, "4 ranks are not divisible by sequence 4 x tensor 2"),
        ({"fsdp": 3}, "cannot shard over 3 of 4 ranks .* use a multiple of 1 that divides 4"),
        ({"fsdp": 4, "tensor": 2}, "cannot shard over 4 of 4 ranks .* use a multiple of 1 that divides 2"),
        ({"fsdp": 1, "sequence": 2}, "cannot shard over 1 of 4 ranks .* use a multiple of 2 that divides 4"),
        ({"pipeline": 3}, "4 ranks are not divisible by sequence 1 x tensor 1 x pipeline 3"),
        ({"pipeline": 2, "fsdp": 4}, "cannot shard over 4 of 2 ranks of a stage .* use a multiple of 1 that divides 2"),
        ({"expert": 3}, "experts cannot be divided over 3 of 4 ranks over which FSDP shards them: use a divisor"),
        ({"expert": 4, "fsdp": 2}, "experts cannot be divided over 4 of 2 ranks"),
        ({"expert": 4, "fsdp": 1, "tensor": 2}, "experts cannot be divided over 4 of 1 x tensor 2 ranks"),
        ({"expert": 4, "pipeline": 2}, "experts cannot be divided over 4 of 2 ranks"),
        ({"expert": 0}, "the size of the expert axis is 0"),
        ({"virtual": 2}, "virtual 2 needs pipeline above 1: set it to 1"),
    ],
)
def test_sizes_that_do_not_divide_the_ranks_are_refused(sizes: dict[str, int], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ParallelDims.of(4, **sizes)


def test_groups_have_the_ranks_that_differ_in_their_axes_alone() -> None:
    dims = ParallelDims(replicate=2, shard=1, sequence=2, tensor=2)

    assert dims.groups("tensor") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.groups("sequence") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.groups("sequence", "tensor") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dims.groups("replicate", "shard") == [[0, 4], [1, 5], [2, 6], [3, 7]]


@pytest.mark.parametrize(
    ("size", "query_heads", "key_heads", "split"),
    [
        (1, 32, 8, (1, 1)),
        (8, 32, 8, (8, 1)),
        (16, 32, 8, (8, 2)),
        (4, 14, 2, (2, 2)),
        (6, 14, 2, (2, 3)),
        (12, 28, 4, (4, 3)),
        (8, 8, 1, (1, 8)),
        # The largest size that divides both, not only one of them.
        (8, 12, 4, (4, 2)),
        (5, 12, 4, (1, 5)),
    ],
)
def test_as_many_ranks_as_possible_divide_the_heads(
    size: int, query_heads: int, key_heads: int, split: tuple[int, int]
) -> None:
    assert heads_and_context(size, query_heads, key_heads) == split


@pytest.mark.parametrize(
    ("size", "per_host", "split"),
    [(16, 8, (8, 2)), (16, 4, (4, 4)), (16, 1, (1, 16)), (4, 8, (4, 1)), (24, 12, (4, 6))],
)
def test_heads_are_divided_inside_a_host(size: int, per_host: int, split: tuple[int, int]) -> None:
    assert heads_and_context(size, 32, 16, per_host) == split


def test_ranks_that_gather_keys_are_around_those_that_divide_heads() -> None:
    dims = ParallelDims(shard=2, sequence=2, context=2)

    assert (dims.fsdp, dims.slices, dims.model_parallel, dims.num_shards) == (8, 4, 4, 2)
    assert dims.groups("sequence") == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert dims.groups("context") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert dims.groups("context", "sequence") == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert dims.name(6) == "rank 6 of 8 (shard 1 of 2, context 1 of 2, sequence 0 of 2)"
    dims.check_host(2)
    with pytest.raises(ValueError, match="2 ranks that divide heads would span hosts: this one has 1 ranks"):
        dims.check_host(1)


def test_a_stage_is_a_consecutive_part_of_the_ranks() -> None:
    dims = ParallelDims(shard=2, tensor=2, pipeline=2)

    assert dims.groups("pipeline") == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert dims.groups("replicate", "shard") == [[0, 2], [1, 3], [4, 6], [5, 7]]
    assert [dims.shard_of(rank) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert (dims.of_stage, dims.num_shards, dims.fsdp) == (4, 2, 2)
    assert dims.name(5) == "rank 5 of 8 (pipeline 1 of 2, shard 0 of 2, tensor 1 of 2)"


def test_consecutive_ranks_divide_experts_and_fsdp_shards_over_those_with_the_same_ones() -> None:
    dims = ParallelDims(replicate=2, shard=4, expert=2)
    assert dims.expert_groups() == {
        "replicate": [[0, 4], [1, 5], [2, 6], [3, 7]],
        "shard": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "expert": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert ParallelDims(pipeline=2, shard=4, expert=2).expert_groups() == {
        "shard": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "expert": [[0, 1], [2, 3], [4, 5], [6, 7]],
    }
    assert list(ParallelDims(shard=2, sequence=2, expert=4).expert_groups().values()) == [
        [[0], [1], [2], [3]],
        [[0, 1, 2, 3]],
    ]


def test_tensor_parallel_ranks_are_among_those_that_divide_experts() -> None:
    assert ParallelDims(shard=2, tensor=2, expert=2).expert_groups() == {
        "shard": [[0, 2], [1, 3]],
        "expert": [[0, 1], [2, 3]],
    }
    assert ParallelDims(replicate=2, tensor=2, pipeline=2).expert_groups() == {
        "replicate": [[0, 2], [1, 3], [4, 6], [5, 7]],
        "shard": [[0, 1], [2, 3], [4, 5], [6, 7]],
        "expert": [[rank] for rank in range(8)],
    }


@pytest.mark.parametrize(
    "dims",
    [
        ParallelDims(shard=12, expert=4),
        ParallelDims(shard=12, expert=3),
        ParallelDims(replicate=3, shard=2, tensor=2, expert=4),
        ParallelDims(replicate=2, shard=2, context=3, pipeline=2, expert=6),
        ParallelDims(shard=6, sequence=2, pipeline=2, expert=3),
    ],
    ids=str,
)
def test_experts_stay_on_a_host_if_their_size_divides_its_ranks(dims: ParallelDims) -> None:
    """The rule of the warning about expertParallelSize, in `ppojob_api.v1alpha1.spec_warnings`."""
    groups = dims.expert_groups()["expert"]
    sizes = [size for size in range(1, dims.world_size + 1) if dims.world_size % size == 0]
    inside = [size for size in sizes if all(len({rank // size for rank in ranks}) == 1 for ranks in groups)]

    assert inside == [size for size in sizes if size % dims.expert == 0]


def test_stages_may_be_on_different_hosts() -> None:
    ParallelDims(pipeline=4).check_host(1)


def test_a_rank_has_a_name_with_its_place_on_each_axis() -> None:
    assert ParallelDims(shard=4).name(3) == "rank 3 of 4"
    assert ParallelDims(2, 2, 1, 2).name(5) == "rank 5 of 8 (replicate 1 of 2, shard 0 of 2, tensor 1 of 2)"


@pytest.mark.parametrize(("num_local", "is_refused"), [(1, True), (2, True), (4, False), (8, False), (6, True)])
def test_groups_that_divide_a_layer_or_its_heads_stay_on_a_host(num_local: int, is_refused: bool) -> None:
    dims = ParallelDims(shard=6, sequence=2, tensor=2)
    says = f"would span hosts: this one has {num_local} ranks. Let tensorParallelSize x .* divide gpusPerNode"

    with pytest.raises(ValueError, match=says) if is_refused else nullcontext():
        dims.check_host(num_local)


def test_a_group_that_spans_hosts_is_refused_before_the_rendezvous() -> None:
    with pytest.raises(ValueError, match="would span hosts: this one has 1"):
        init_process_group(Device.CPU, 0, ParallelDims(tensor=2), listen("127.0.0.1", 1), 1, num_local=1)
