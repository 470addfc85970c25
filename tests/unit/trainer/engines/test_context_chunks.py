"""Which tokens a context rank has, and which keys its queries attend to: by hand, and against the whole mask."""

from __future__ import annotations

import pytest
import torch

from ppojob_trainer.engines.train.context import Chunks, attended


def whole_mask(lengths: tuple[int, ...], total: int) -> torch.Tensor:
    """The causal mask of all tokens; what fills up the chunks is a sequence of its own."""
    parts = [*lengths, total - sum(lengths)]
    return torch.block_diag(*(torch.ones(length, length).tril() for length in parts)).bool()


def test_a_rank_has_a_chunk_from_the_beginning_and_one_from_the_end() -> None:
    chunks = Chunks(3, 4)
    assert [chunks.of(rank) for rank in range(3)] == [((0, 4), (20, 24)), ((4, 8), (16, 20)), ((8, 12), (12, 16))]
    gathered = torch.cat([torch.arange(*part) for rank in range(3) for part in chunks.of(rank)])
    assert gathered[chunks.in_gathered(torch.arange(24))].tolist() == list(range(24))


def test_pieces_of_sequences_by_hand() -> None:
    # Chunks of 3 tokens: rank 0 has places 0 to 2 and 9 to 11, rank 1 has 3 to 8; place 11 fills up the chunks.
    first, second = (attended((5, 2, 4), Chunks(2, 3), rank) for rank in (0, 1))
    assert (first.query_lengths, first.key_lengths) == ((3, 2, 1), (3, 4, 1))
    # The keys of places 0 to 2 and 7 to 11. After the gather, places 3 to 8 come last.
    assert first.places.tolist() == [0, 1, 2, 10, 11, 3, 4, 5]
    assert (second.query_lengths, second.key_lengths) == ((2, 1, 1, 2), (5, 1, 2, 2))
    assert second.places.tolist() == [0, 1, 2, 6, 7, 8, 8, 9, 10, 11]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("lengths", [(1,), (24,), (5, 1, 17), (4, 4, 4, 4), (1, 1, 1), (11, 12)])
def test_the_queries_of_all_ranks_attend_to_what_the_whole_mask_shows(lengths: tuple[int, ...], num_ranks: int) -> None:
    chunks = Chunks(num_ranks, -(-sum(lengths) // (2 * num_ranks)))
    total = 2 * num_ranks * chunks.size
    gathered = torch.cat([torch.arange(*part) for rank in range(num_ranks) for part in chunks.of(rank)])
    seen = torch.zeros(total, total, dtype=torch.bool)
    for rank in range(num_ranks):
        found = attended(lengths, chunks, rank)
        queries = torch.cat([torch.arange(*part) for part in chunks.of(rank)]).split(list(found.query_lengths))
        keys = gathered[found.places].split(list(found.key_lengths))
        for of_query, of_key in zip(queries, keys, strict=True):
            assert torch.equal(of_key[-len(of_query) :], of_query), "queries are the last of their keys' tokens"
            seen[of_query.unsqueeze(1), of_key] = of_key <= of_query.unsqueeze(1)
    assert torch.equal(seen, whole_mask(lengths, total))


def test_a_long_sequence_is_the_same_work_for_every_rank() -> None:
    work = []
    for rank in range(4):
        found = attended((80,), Chunks(4, 10), rank)
        pairs = zip(found.query_lengths, found.key_lengths, strict=True)
        work.append(sum(queries * keys - queries * (queries - 1) // 2 for queries, keys in pairs))
    assert work == [work[0]] * 4
    assert sum(work) == 80 * 81 // 2
