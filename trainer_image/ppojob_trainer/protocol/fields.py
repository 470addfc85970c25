"""The dtypes of all tensor columns that go between worker groups, and the check of a batch against them.

All of them are ragged. Columns of the sequence have a value for each token of prompt and response; columns of the
response have one for each token of the response, so the length of response_mask says where the response begins.
routed_experts has several values for each token. See `layout` for a worked example.
"""

from dataclasses import dataclass
from typing import Final

import torch

from ppojob_trainer.protocol.data_proto import DataProto
from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.keys import Keys
from ppojob_trainer.protocol.ragged import Ragged


@dataclass(frozen=True)
class Field:
    """What a tensor column must look like: which tokens it has values for, its dtype, its meaning."""

    tokens: str
    dtype: torch.dtype
    meaning: str
    wider: torch.dtype | None = None
    """Dtype of values that `dtype` has no room for."""


_PROMPT, _SEQUENCE, _RESPONSE = "prompt", "sequence", "response"
_EXPERTS = "experts of a sequence"
_FLOAT = torch.float32

FIELDS: Final[dict[str, Field]] = {
    Keys.PROMPT_IDS: Field(_PROMPT, torch.int32, "prompt tokens"),
    Keys.INPUT_IDS: Field(_SEQUENCE, torch.int32, "prompt tokens, then response tokens"),
    Keys.RESPONSE_MASK: Field(_RESPONSE, torch.bool, "True on tokens that the policy generated (the end token too)"),
    Keys.ROLLOUT_LOG_PROBS: Field(_RESPONSE, _FLOAT, "log-prob of each token as the rollout engine computed it"),
    Keys.ROLLOUT_VERSIONS: Field(
        _RESPONSE, torch.int32, "the step after which the policy had the weights that sampled it"
    ),
    Keys.ROUTED_EXPERTS: Field(
        _EXPERTS,
        torch.uint8,
        "for each token of the sequence but the last, and each of its layers, the experts that the engine chose",
        wider=torch.int16,
    ),
    Keys.OLD_LOG_PROBS: Field(
        _RESPONSE, _FLOAT, "log-prob under the policy before the update, by the trainer or the engine"
    ),
    Keys.REF_LOG_PROB: Field(_RESPONSE, _FLOAT, "log-prob under the reference policy"),
    Keys.ENTROPYS: Field(_RESPONSE, _FLOAT, "entropy of the policy's distribution for each token, in nats"),
    Keys.VALUES: Field(_RESPONSE, _FLOAT, "value of the state in which the token was chosen (before it)"),
    Keys.FUNCTION_SCORES: Field(_RESPONSE, _FLOAT, "the reward function's score, where a reward model scores too"),
    Keys.MODEL_SCORES: Field(_RESPONSE, _FLOAT, "the reward model's score, where a reward function scores too"),
    Keys.TOKEN_LEVEL_SCORES: Field(_RESPONSE, _FLOAT, "the reward's score, on the last response token"),
    Keys.ADVANTAGES: Field(_RESPONSE, _FLOAT, "advantages, 0 where response_mask is False"),
    Keys.RETURNS: Field(_RESPONSE, _FLOAT, "targets of the critic, 0 where response_mask is False"),
}

SEQUENCES: Final = (Keys.INPUT_IDS, Keys.RESPONSE_MASK)
"""What a model's forward pass reads."""

ROLLOUT_COLUMNS: Final = (
    Keys.INPUT_IDS,
    Keys.RESPONSE_MASK,
    Keys.ROLLOUT_LOG_PROBS,
    Keys.ROLLOUT_VERSIONS,
    Keys.ROUTED_EXPERTS,
)
"""What the rollout returns. The last three are there only if the job needs them."""


def check_layout(proto: DataProto, sent: DataProto | None = None) -> None:
    """Check every known tensor column of `proto` against `FIELDS`: ragged, dtype, and equal lengths of the response.

    Unknown columns pass: a user's worker group may add its own.

    Args:
        sent: the batch that a method got; columns of the response must have the same lengths as there, too.

    Raises:
        ProtocolError: names the column, what it is and what it should be.
    """
    known: tuple[str, Ragged] | None = None
    if sent is not None and Keys.RESPONSE_MASK in sent.columns:
        known = Keys.RESPONSE_MASK, sent.ragged(Keys.RESPONSE_MASK)
    for name, column in proto.columns.items():
        field = FIELDS.get(name)
        if field is None:
            continue
        if not isinstance(column, Ragged):
            raise ProtocolError(
                f"column {name!r} is a tensor {list(column.shape)}, wanted a Ragged ({field.meaning}): "
                "batch.ragged('response_mask').unpadded(tensor) makes one of a tensor [B, R]"
            )
        if column.dtype not in (field.dtype, field.wider):
            raise ProtocolError(f"column {name!r} has {column.dtype}, wanted {field.dtype}: {field.meaning}")
        if field.tokens != _RESPONSE:
            continue
        if known is not None and not torch.equal(column.lengths, known[1].lengths):
            row = int((column.lengths != known[1].lengths).nonzero()[0])
            raise ProtocolError(
                f"column {name!r} has {int(column.lengths[row])} values in row {row}, but {known[0]!r} has "
                f"{int(known[1].lengths[row])}: return one for each token of the response"
            )
        known = known or (name, column)
