"""Registered methods: what they are on the class, on an instance, and after a journey; how answers are merged."""

import pickle

import pytest

from ppojob_trainer.protocol import DataProto
from ppojob_trainer.worker_groups.dispatch import (
    Dispatch,
    Execute,
    RemoteMethod,
    merge_metrics,
    register,
    split_all_to_all,
)


class Counter:
    """A worker."""

    def __init__(self, start: int) -> None:
        self.count = start

    @register(dispatch=Dispatch.ONE_TO_ALL, blocking=True)
    def add(self, amount: int) -> int:
        """Add to the count."""
        self.count += amount
        return self.count

    @register(dispatch=Dispatch.RANK_ZERO)
    def read(self) -> int:
        return self.count

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def through(self, batch: DataProto) -> DataProto:
        return batch


def test_on_an_instance_it_is_an_ordinary_method() -> None:
    counter = Counter(3)

    assert counter.add(2) == 5
    assert counter.read() == 5


def test_on_the_class_it_knows_how_it_is_called() -> None:
    assert isinstance(Counter.add, RemoteMethod)
    assert (Counter.add.dispatch, Counter.add.execute, Counter.add.blocking) == (
        Dispatch.ONE_TO_ALL,
        Execute.ALL,
        True,
    )
    assert Counter.read.execute is Execute.RANK_ZERO, "as its dispatch says"
    assert Counter.add.__doc__ == "Add to the count."


def test_it_travels_by_name() -> None:
    assert pickle.loads(pickle.dumps(Counter.add)) is Counter.add


def test_rank_zero_alone_cannot_run_what_is_split_over_ranks() -> None:
    def method(self: Counter, batch: DataProto) -> DataProto:
        return batch

    with pytest.raises(ValueError, match="gives work to every rank, so execute must be ALL"):
        register(dispatch=Dispatch.DP_COMPUTE_PROTO, execute=Execute.RANK_ZERO)(method)


def test_a_declaration_of_no_column_is_refused() -> None:
    with pytest.raises(ValueError, match="reads names no column: name those that the method reads"):
        register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=())


def test_what_peers_are_asked_together() -> None:
    asked_together = {mode for mode in Dispatch if mode.knows_peers}

    assert asked_together == {Dispatch.DP_COMPUTE_METRIC, Dispatch.MESH_COMPUTE_PROTO}
    assert {mode for mode in Dispatch if mode.returns_rows} == {Dispatch.DP_COMPUTE_PROTO, Dispatch.MESH_COMPUTE_PROTO}


def test_one_argument_for_each_rank_or_an_error() -> None:
    assert split_all_to_all(["a", "b"], 2, "f") == ["a", "b"]
    with pytest.raises(ValueError, match="f takes one argument for each of 3 ranks, got 2"):
        split_all_to_all(["a", "b"], 3, "f")


def test_metrics_of_ranks_are_merged_by_their_names() -> None:
    merged = merge_metrics(
        [
            {"score/mean": 1.0, "score/max": 3.0, "score/min": 0.5, "only_here": 2.0},
            {"score/mean": 2.0, "score/max": 5.0, "score/min": 0.25},
        ]
    )

    assert merged == {"score/mean": 1.5, "score/max": 5.0, "score/min": 0.25, "only_here": 2.0}
