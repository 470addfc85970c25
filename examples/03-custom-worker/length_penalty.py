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

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO, reads=(Keys.RESPONSE_MASK, Keys.TOKEN_LEVEL_SCORES))
    def penalize(self, batch: DataProto) -> DataProto:
        """After Score: each process gets a part of the rows and returns as many rows, here with new scores."""
        # Tensors [B, R], filled with zeros behind each response.
        mask, scores = batch.padded(Keys.RESPONSE_MASK), batch.padded(Keys.TOKEN_LEVEL_SCORES)
        too_long = (mask.sum(dim=1) - self.target_tokens).clamp(min=0)
        penalty = self.per_token * too_long
        # The score of a response is on its last token.
        is_last = mask.cumsum(dim=1).eq(mask.sum(dim=1, keepdim=True)) & mask
        penalized = scores - is_last * penalty.unsqueeze(1)
        return DataProto.from_dict(
            # A returned column has no padding.
            {Keys.TOKEN_LEVEL_SCORES: batch.ragged(Keys.RESPONSE_MASK).unpadded(penalized)},
            meta_info={Meta.METRICS: {"length_penalty/mean": penalty.tolist()}},
        )

    @register(dispatch=Dispatch.RANK_ZERO, reads=(Keys.INPUT_IDS, Keys.RESPONSE_MASK))
    def count_repetitions(self, batch: DataProto) -> dict[str, float]:
        """After Step: the first process gets all rows, remembers the responses, and returns metrics."""
        generated = [tuple(response) for response in batch.responses().to_lists()]
        repeated = sum(response in self.seen for response in generated)
        self.seen.update(generated)
        return {"responses/seen_before": repeated / len(generated), "responses/distinct": float(len(self.seen))}
