"""Workers that make columns of any length and compute nothing, for the measurement of what passes the controller."""

from __future__ import annotations

import torch

from ppojob_trainer.protocol import DataProto, Keys, Meta
from ppojob_trainer.worker_groups.dispatch import Dispatch, Metrics, register
from ppojob_trainer.worker_groups.table import StoredRows, store_rows
from ppojob_trainer.worker_groups.worker_process import Seat


class ColumnWorker:
    """Answers as the roles do: prompts, responses, columns [B, R], and metrics."""

    def __init__(self, seat: Seat) -> None:
        self.seat = seat

    @register(dispatch=Dispatch.RANK_ZERO)
    def next_batch(self, rows: int) -> StoredRows:
        """Return the rows of a step by their names."""
        return store_rows(DataProto.from_dict({"row": torch.arange(rows)}, {Keys.UID: [f"p{n}" for n in range(rows)]}))

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def generate_sequences(self, prompts: DataProto, *, length: int) -> DataProto:
        """Return responses and masks [B, length], where each row has tokens on all but its last places."""
        shape = (len(prompts), length)
        mask = (torch.arange(length) < length - prompts.tensor("row").unsqueeze(1) % 7).long()
        tensors = {Keys.RESPONSES: torch.zeros(shape, dtype=torch.int64), Keys.RESPONSE_MASK: mask}
        return DataProto.from_dict({**tensors, Keys.ATTENTION_MASK: mask})

    @register(dispatch=Dispatch.DP_COMPUTE_PROTO)
    def compute(self, batch: DataProto, *, column: str) -> DataProto:
        """Return a column float32 [B, R] that depends on the rows."""
        shape = batch.tensor(Keys.RESPONSE_MASK).shape
        values = batch.tensor("row").float().unsqueeze(1).expand(shape).contiguous()
        return DataProto.from_dict({column: values}, meta_info={Meta.METRICS: {f"{column}/mean": [1.0]}})

    @register(dispatch=Dispatch.DP_COMPUTE_METRIC)
    def update(self, batch: DataProto, *, columns: tuple[str, ...]) -> Metrics:
        """Read all columns, and say how many numbers they hold."""
        return {"numbers/max": float(sum(batch.tensor(column).numel() for column in columns))}
