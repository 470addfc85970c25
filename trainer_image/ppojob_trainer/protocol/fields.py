"""The shapes and dtypes of all tensor fields that go between worker groups, and the check of a batch against them.

Dimensions: B sequences, P the padded prompt length, R the padded response length, S = P + R. See `layout` for a worked
example of the padding.
"""

from dataclasses import dataclass
from typing import Final

import torch

from ppojob_trainer.protocol.data_proto import DataProto
from ppojob_trainer.protocol.errors import ProtocolError
from ppojob_trainer.protocol.keys import Keys


@dataclass(frozen=True)
class Field:
    """What a tensor field must look like: the names of its dimensions, its dtype, its meaning."""

    dims: tuple[str, ...]
    dtype: torch.dtype
    meaning: str


_INT = torch.int64
_FLOAT = torch.float32

FIELDS: Final[dict[str, Field]] = {
    Keys.PROMPTS: Field(("B", "P"), _INT, "prompt tokens, padded on the left"),
    Keys.RESPONSES: Field(("B", "R"), _INT, "response tokens, padded on the right"),
    Keys.INPUT_IDS: Field(("B", "S"), _INT, "prompts and responses side by side"),
    Keys.ATTENTION_MASK: Field(("B", "S"), _INT, "1 on real tokens, 0 on padding"),
    Keys.POSITION_IDS: Field(("B", "S"), _INT, "0, 1, 2 ... over the real tokens, 0 on the left padding"),
    Keys.RESPONSE_MASK: Field(("B", "R"), _INT, "1 on tokens that the policy generated (the end token too), else 0"),
    Keys.ROLLOUT_LOG_PROBS: Field(("B", "R"), _FLOAT, "log-prob of each token as the rollout engine computed it"),
    Keys.OLD_LOG_PROBS: Field(("B", "R"), _FLOAT, "log-prob under the policy before the update, by the trainer"),
    Keys.REF_LOG_PROB: Field(("B", "R"), _FLOAT, "log-prob under the reference policy"),
    Keys.ENTROPYS: Field(("B", "R"), _FLOAT, "entropy of the policy's distribution for each token, in nats"),
    Keys.VALUES: Field(("B", "R"), _FLOAT, "value of the state in which the token was chosen (before it)"),
    Keys.FUNCTION_SCORES: Field(("B", "R"), _FLOAT, "the reward function's score, where a reward model scores too"),
    Keys.MODEL_SCORES: Field(("B", "R"), _FLOAT, "the reward model's score, where a reward function scores too"),
    Keys.TOKEN_LEVEL_SCORES: Field(("B", "R"), _FLOAT, "the reward's score, on the last response token"),
    Keys.TOKEN_LEVEL_REWARDS: Field(("B", "R"), _FLOAT, "scores minus the KL penalty"),
    Keys.ADVANTAGES: Field(("B", "R"), _FLOAT, "advantages, 0 where response_mask is 0"),
    Keys.RETURNS: Field(("B", "R"), _FLOAT, "targets of the critic, 0 where response_mask is 0"),
}


def check_layout(proto: DataProto) -> None:
    """Check every known tensor field of `proto` against `FIELDS`: rank, dtype, and equal sizes of equal dimensions.

    Unknown fields pass: a user's worker group may add its own. Call it where data enters a group; it reads shapes
    only.

    Raises:
        ProtocolError: names the field, what it is and what it should be.
    """
    if proto.batch is None:
        return
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in proto.batch.items():
        field = FIELDS.get(name)
        if field is None:
            continue
        if tensor.dtype != field.dtype or tensor.dim() != len(field.dims):
            raise ProtocolError(
                f"field {name!r} is {tensor.dtype}{list(tensor.shape)}, wanted {field.dtype}[{', '.join(field.dims)}]: "
                f"{field.meaning}"
            )
        for dim, size in zip(field.dims, tensor.shape, strict=True):
            known, known_from = sizes.setdefault(dim, (size, name))
            if known != size:
                raise ProtocolError(f"field {name!r} has {dim} = {size}, but {known_from!r} has {dim} = {known}")
    if {"P", "R", "S"} <= sizes.keys() and sizes["P"][0] + sizes["R"][0] != sizes["S"][0]:
        raise ProtocolError(
            f"{sizes['S'][1]!r} has length {sizes['S'][0]}, which is not prompt length {sizes['P'][0]} "
            f"+ response length {sizes['R'][0]}"
        )
