"""Divides a batch into micro-batches of packed tokens, with the position of each response token's output.

Called by the engines. Everything here runs on the CPU, before the tokens are copied to the device, so that no step
of a training loop waits for the device. It refuses shards that cannot be divided into equal minibatches, because ranks
with different numbers of minibatches would deadlock.

Suffixes: B sequences, b sequences of a micro-batch, R data.maxResponseLength, T packed tokens, N tokens of the policy
in a micro-batch (response_mask True).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from torch.nn import functional

from ppojob_trainer.engines.train.context import attended
from ppojob_trainer.engines.train.sequence import SequencePeers
from ppojob_trainer.maths.packing import micro_batches, num_micro_batches, pack
from ppojob_trainer.protocol import DataProto, Keys, ProtocolError, Ragged

NOT_RECORDED: Final = -1
"""In place of an expert's number: the model chooses it itself."""
_BOUND_STEP: Final = 256


class EngineMeta:
    """Keys of `DataProto.meta_info` that the engines' updates read.

    RESPONSE_LENGTH: data.maxResponseLength, the width R of the padded tensors that the losses read.
    """

    RESPONSE_LENGTH: Final = "response_length"
    NUM_MINI_BATCHES: Final = "num_mini_batches"
    EPOCHS: Final = "epochs"


@dataclass(frozen=True)
class Segments:
    """The boundaries of packed sequences: cu_seqlens int32 [b + 1] on the device, lengths on the host.

    They are those of the queries that attention computes at once. peers: the sequence-parallel group that the tokens
    are divided over, if any. With context parallelism the queries are those of a context rank (pieces of sequences, and
    what fills up its chunks), and keys are the boundaries of their keys; without, keys is None, and a sequence's
    queries and keys are the same tokens. places: int64, of the keys among all gathered ones.

    bound: tokens of the longest sequence, rounded up; num_tokens: of all sequences. Both are computed from the lengths:
    a compiled layer is compiled again for each number that it reads, so it must not read the lengths.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    peers: SequencePeers | None = None
    keys: Segments | None = None
    places: Tensor | None = None
    # No field(init=False): FSDP copies its module's arguments by `dataclasses.replace`, which refuses such fields.
    bound: int = 0
    num_tokens: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_tokens", sum(self.lengths))
        object.__setattr__(self, "bound", -(-max(self.lengths, default=0) // _BOUND_STEP) * _BOUND_STEP)


@dataclass(frozen=True)
class PackedTokens:
    """The input of a model's forward pass.

    input_ids, position_ids: int64 [1, T]. rows: int64 [N], the positions in T whose output predicts a token of the
    policy. labels: int64 [N], those tokens. If the tokens are divided over ranks, T and N are of this rank's slice.
    experts: int16 [T, E], the experts that the rollout engine chose in all layers; -1 where none were recorded, which
    is the last token of each sequence. None without `rollout.routingReplay`. num_tokens: of all sequences, on all ranks
    together. num_own: tokens of this rank; those behind them fill up its slice.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: Segments
    rows: Tensor
    labels: Tensor
    num_tokens: int
    num_own: int
    experts: Tensor | None = None


@dataclass(frozen=True)
class MicroBatch:
    """Some sequences of a batch, on the device that computes.

    indices: their rows in the batch, int64 [b] on the CPU. places: int64 [N], the position of each token of the policy
    in the flattened [b * R]. fields: the tensors [b, R] that the loss reads; response_mask is int64.
    """

    indices: Tensor
    tokens: PackedTokens
    places: Tensor
    fields: dict[str, Tensor]
    shape: tuple[int, int]

    def spread(self, values: Tensor) -> Tensor:
        """Scatter values [N], with those of the group's other slices, into [b, R], 0 elsewhere. Differentiable."""
        num_sequences, width = self.shape
        flat = values.new_zeros(num_sequences * width).index_copy(0, self.places, values)
        peers = self.tokens.segments.peers
        return (flat if peers is None else peers.sum(flat)).view(num_sequences, width)


def sequence_lengths(batch: DataProto) -> list[int]:
    """Return the number of tokens of each sequence (prompt and response)."""
    lengths: list[int] = batch.ragged(Keys.INPUT_IDS).lengths.tolist()
    return lengths


def split_minibatches(batch: DataProto, number: int) -> list[DataProto]:
    """Divide a rank's shard into `number` consecutive parts of equal size.

    Raises:
        ProtocolError: the number of rows is not divisible by `number`.
    """
    if number < 1 or len(batch) == 0 or len(batch) % number:
        raise ProtocolError(
            f"a shard of {len(batch)} sequences cannot be split into {number} equal minibatches: "
            f"pad the whole batch to a multiple of ranks times {max(number, 1)} first"
        )
    return batch.split(len(batch) // number)


@dataclass(frozen=True)
class MicroBatchPlan:
    """How a batch is divided: exactly `number` micro-batches (equal on all ranks) of at most `max_tokens` tokens.

    width: of a pipeline's messages, see `widest`; 0 without a pipeline.
    """

    number: int
    max_tokens: int
    width: int = 0


def num_passes(lengths: Sequence[int], max_tokens: int, ranks: int = 1, virtual: int = 1) -> int:
    """Return how many micro-batches a rank's sequences need.

    A pipeline needs at least one for each rank (1F1B). If each rank has several stages, the number is a multiple of the
    ranks, because a rank computes that many micro-batches in one stage before it changes to its next one. With fewer
    sequences than that, there are as many micro-batches as sequences.

    Args:
        ranks: of a pipeline. virtual: stages of each rank.

    Raises:
        ValueError: a sequence alone is longer than `max_tokens`.
    """
    number = max(num_micro_batches(lengths, max_tokens), ranks)
    if virtual > 1:
        number = -(-number // ranks) * ranks
    return max(1, min(number, len(lengths)))


def build_micro_batches(
    batch: DataProto,
    plan: MicroBatchPlan,
    fields: Sequence[str],
    width: int,
    device: torch.device,
    peers: SequencePeers | None = None,
) -> Iterator[MicroBatch]:
    """Yield the micro-batches, nearly equal in tokens, each on `device`; of its tokens only this rank's slice.

    Args:
        fields: columns of the response that become `MicroBatch.fields`.
        width: R of padded tensors.
    """
    for part in micro_batches(sequence_lengths(batch), plan.max_tokens, plan.number):
        yield _build(batch, torch.tensor(part), fields, width, device, peers)


def widest(batch: DataProto, plan: MicroBatchPlan, peers: SequencePeers | None = None) -> int:
    """Return the tokens of the largest micro-batch; with sequence parallelism of its slice."""
    lengths = sequence_lengths(batch)
    parts = micro_batches(lengths, plan.max_tokens, plan.number)
    most = max(sum(lengths[row] for row in part) for part in parts)
    return most if peers is None else peers.width(most)


def _build(
    batch: DataProto,
    indices: Tensor,
    fields: Sequence[str],
    width: int,
    device: torch.device,
    peers: SequencePeers | None,
) -> MicroBatch:
    def moved(tensor: Tensor) -> Tensor:
        if device.type == "cpu":
            return tensor
        # A copy from memory that is not pinned would wait for all queued work of the device.
        return tensor.pin_memory().to(device, non_blocking=True)

    def field(key: str) -> Tensor:
        padded = moved(batch.ragged(key).take(indices).padded(width))
        return padded.long() if padded.dtype == torch.bool else padded

    sequences, mask = batch.ragged(Keys.INPUT_IDS).take(indices), batch.ragged(Keys.RESPONSE_MASK).take(indices)
    packed = pack(sequences.values, sequences.lengths)
    # The output at a token predicts the next one, so the prediction of response token r is one position before it.
    before_response = sequences.starts + sequences.lengths - mask.lengths - 1
    rows = (before_response[mask.row_of] + mask.place_of)[mask.values]
    places = (mask.row_of * width + mask.place_of)[mask.values]
    labels = packed.labels[rows]
    input_ids, position_ids = packed.input_ids, packed.position_ids
    experts = _recorded_experts(batch, sequences, indices)
    num_tokens = num_own = len(input_ids)
    if peers is not None:
        own = peers.places(num_tokens)
        num_own = int((own < num_tokens).sum())
        row_of = torch.full((num_tokens,), -1).scatter(0, own[:num_own], torch.arange(num_own))
        is_mine = row_of[rows] >= 0
        rows, labels, places = row_of[rows][is_mine], labels[is_mine], places[is_mine]
        input_ids, position_ids = peers.cut(input_ids), peers.cut(position_ids)
        experts = None if experts is None else peers.cut(experts, padding=NOT_RECORDED)
    tokens = PackedTokens(
        input_ids=moved(input_ids.unsqueeze(0)),
        position_ids=moved(position_ids.unsqueeze(0)),
        segments=_segments(packed.cu_seqlens, sequences.lengths.tolist(), peers, moved),
        rows=moved(rows),
        labels=moved(labels),
        num_tokens=num_tokens,
        num_own=num_own,
        experts=None if experts is None else moved(experts),
    )
    return MicroBatch(
        indices=indices,
        tokens=tokens,
        places=moved(places),
        fields={key: field(key) for key in fields},
        shape=(len(mask), width),
    )


def _segments(
    cu_seqlens: Tensor, lengths: Sequence[int], peers: SequencePeers | None, moved: Callable[[Tensor], Tensor]
) -> Segments:
    if peers is None or peers.context is None:
        return Segments(moved(cu_seqlens), tuple(lengths), peers)
    found = attended(lengths, peers.chunks(sum(lengths)), peers.context.rank)
    queries, keys = (
        functional.pad(torch.tensor(each).cumsum(0).int(), (1, 0)) for each in (found.query_lengths, found.key_lengths)
    )
    of_keys = Segments(moved(keys), found.key_lengths)
    return Segments(moved(queries), found.query_lengths, peers, of_keys, moved(found.places))


def _recorded_experts(batch: DataProto, sequences: Ragged, indices: Tensor) -> Tensor | None:
    """Return the recorded experts of some rows of a batch, packed as their tokens are: int16 [T, E].

    Raises:
        ProtocolError: the recording is not that of the tokens.
    """
    if Keys.ROUTED_EXPERTS not in batch:
        return None
    rows = batch.ragged(Keys.ROUTED_EXPERTS).rows()
    recorded = [rows[row] for row in indices.tolist()]
    lengths = sequences.lengths.tolist()
    of_a_token = sum(map(len, recorded)) // max(1, sum(lengths) - len(lengths))
    for row, values, length in zip(indices.tolist(), recorded, lengths, strict=True):
        if len(values) != of_a_token * (length - 1) or not of_a_token:
            raise ProtocolError(
                f"row {row} has {len(values)} values in {Keys.ROUTED_EXPERTS!r}, which are not {of_a_token} for each "
                f"of its {length} tokens but the last"
            )
    last = torch.full((1, of_a_token), NOT_RECORDED, dtype=torch.int16)
    return torch.cat([part for values in recorded for part in (values.view(-1, of_a_token).to(torch.int16), last)])
