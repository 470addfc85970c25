"""A worker group of the user's own: long responses lose score, and repeated ones are counted.

Nothing of ppojob is touched for it: this file and the lines under `workers` in ppojob.yaml are all.
"""

from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.worker_process import Seat


class LengthPenalty:
    """Each process makes one of these. `seat` says which process it is; the rest are the kwargs of ppojob.yaml."""

    def __init__(self, seat: Seat, target_tokens: int, per_token: float) -> None:
        self.seat = seat
        self.target_tokens = target_tokens
        self.per_token = per_token
        self.seen: set[tuple[int, ...]] = set()

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def penalize(self, batch: DataProto) -> DataProto:
        """After Score: every process gets a part of the rows and returns a row for each, here with new scores."""
        mask = batch.tensor(Keys.RESPONSE_MASK)
        scores = batch.tensor(Keys.TOKEN_LEVEL_SCORES)
        too_long = (mask.sum(dim=1) - self.target_tokens).clamp(min=0)
        penalty = self.per_token * too_long
        # The score of a response lies on its last token.
        is_last = mask.cumsum(dim=1).eq(mask.sum(dim=1, keepdim=True)) & mask.bool()
        return DataProto.from_dict(
            {Keys.TOKEN_LEVEL_SCORES: scores - is_last * penalty.unsqueeze(1)},
            meta_info={Meta.METRICS: {"length_penalty/mean": penalty.tolist()}},
        )

    @register(dispatch=Dispatch.RANK_ZERO)
    def count_repetitions(self, batch: DataProto) -> dict[str, float]:
        """After Step: the first process gets all rows and keeps what it has seen; it returns metrics."""
        mask, responses = batch.tensor(Keys.RESPONSE_MASK), batch.tensor(Keys.RESPONSES)
        written = [tuple(row[: int(length)].tolist()) for row, length in zip(responses, mask.sum(dim=1), strict=True)]
        repeated = sum(response in self.seen for response in written)
        self.seen.update(written)
        return {"responses/seen_before": repeated / len(written), "responses/distinct": float(len(self.seen))}
