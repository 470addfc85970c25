"""Equal sequences for real engines, which are compared with a plan."""

import torch

from ppojob_trainer.protocol import DataProto, Keys, rollout_batch

SEQUENCES, PROMPT, RESPONSE = 4, 64, 64
MICRO_BATCHES = 6
"""Of a pipeline's minibatch: more than a plan of two stages runs."""


def real_batch(sequences: int = SEQUENCES) -> DataProto:
    """Return a batch of equal sequences with the columns of an update."""
    rows = rollout_batch([[1] * PROMPT] * sequences, [[2] * RESPONSE] * sequences)
    mask = rows[Keys.RESPONSE_MASK]
    zeros = mask.with_values(torch.zeros(len(mask.values)))
    meta = {"temperature": 1.0, "response_length": RESPONSE, "num_mini_batches": 1, "epochs": 1}
    columns = rows | dict.fromkeys((Keys.OLD_LOG_PROBS, Keys.ADVANTAGES), zeros)
    return DataProto.from_dict(columns, meta_info=meta)
