"""A user-defined worker group: it lowers the score of long responses and counts repeated ones.

It needs no change of ppojob: only this file and the lines under `workers` in ppojob.yaml.
"""

from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, register
from ppojob_trainer.worker_groups.worker_process import WorkerContext


class LengthPenalty:
    """Each process creates one. `context` has its rank; the other arguments are the kwargs in ppojob.yaml."""

    def __init__(self, context: WorkerContext, target_tokens: int, per_token: float) -> None:
        self.context = context
        self.target_tokens = target_tokens
        self.per_token = per_token
        self.seen: set[tuple[int, ...]] = set()

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def penalize(self, batch: DataProto) -> DataProto:
        """After Score: each process gets a part of the rows and returns as many rows, here with new scores."""
        mask = batch.tensor(Keys.RESPONSE_MASK)
        scores = batch.tensor(Keys.TOKEN_LEVEL_SCORES)
        too_long = (mask.sum(dim=1) - self.target_tokens).clamp(min=0)
        penalty = self.per_token * too_long
        # The score of a response is on its last token.
        is_last = mask.cumsum(dim=1).eq(mask.sum(dim=1, keepdim=True)) & mask.bool()
        return DataProto.from_dict(
            {Keys.TOKEN_LEVEL_SCORES: scores - is_last * penalty.unsqueeze(1)},
            meta_info={Meta.METRICS: {"length_penalty/mean": penalty.tolist()}},
        )

    @register(dispatch=Dispatch.RANK_ZERO)
    def count_repetitions(self, batch: DataProto) -> dict[str, float]:
        """After Step: the first process gets all rows, remembers the responses, and returns metrics."""
        mask, responses = batch.tensor(Keys.RESPONSE_MASK), batch.tensor(Keys.RESPONSES)
        generated = [tuple(row[: int(length)].tolist()) for row, length in zip(responses, mask.sum(dim=1), strict=True)]
        repeated = sum(response in self.seen for response in generated)
        self.seen.update(generated)
        return {"responses/seen_before": repeated / len(generated), "responses/distinct": float(len(self.seen))}
