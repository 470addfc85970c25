"""The names, shapes and dtypes of all fields that go between worker groups, in one place.

The names are verl's, so that code and habits carry over. Dimensions: B sequences, P the padded prompt length,
R the padded response length, S = P + R. See `layout` for a worked example of the padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch

from ppojob_trainer.protocol.errors import ProtocolError

if TYPE_CHECKING:
    from ppojob_trainer.protocol.data_proto import DataProto


class Keys:
    """Field names of `DataProto.batch` (tensors) and `DataProto.non_tensor_batch` (object arrays of length B)."""

    # Tensors: the tokens.
    PROMPTS: Final = "prompts"
    RESPONSES: Final = "responses"
    INPUT_IDS: Final = "input_ids"
    ATTENTION_MASK: Final = "attention_mask"
    POSITION_IDS: Final = "position_ids"
    RESPONSE_MASK: Final = "response_mask"
    # Tensors: what the models and the reward say about each response token.
    ROLLOUT_LOG_PROBS: Final = "rollout_log_probs"
    OLD_LOG_PROBS: Final = "old_log_probs"
    REF_LOG_PROB: Final = "ref_log_prob"
    ENTROPYS: Final = "entropys"
    VALUES: Final = "values"
    FUNCTION_SCORES: Final = "function_scores"
    MODEL_SCORES: Final = "model_scores"
    TOKEN_LEVEL_SCORES: Final = "token_level_scores"
    TOKEN_LEVEL_REWARDS: Final = "token_level_rewards"
    ADVANTAGES: Final = "advantages"
    RETURNS: Final = "returns"
    # Non-tensors: the prompt. PROMPT_IDS holds list[int], without padding.
    PROMPT_IDS: Final = "prompt_ids"
    RAW_PROMPT: Final = "raw_prompt"
    DATA_SOURCE: Final = "data_source"
    GROUND_TRUTH: Final = "ground_truth"
    EXTRA_INFO: Final = "extra_info"
    # Non-tensors: identity. UID names the prompt's occurrence (all samples of one prompt share it: the group of GRPO
    # and RLOO), INDEX the row of the data set, SAMPLE_INDEX which of the prompt's samples a sequence is.
    UID: Final = "uid"
    INDEX: Final = "index"
    SAMPLE_INDEX: Final = "sample_index"


class Meta:
    """Names in `DataProto.meta_info`: small values that hold for the whole batch."""

    # dict[str, list[float]]; `DataProto.concat` joins the lists, all other entries must be equal.
    METRICS: Final = "metrics"
    TEMPERATURE: Final = "temperature"
    EOS_TOKEN_ID: Final = "eos_token_id"
    PAD_TOKEN_ID: Final = "pad_token_id"
    GLOBAL_STEP: Final = "global_step"
    EPOCH: Final = "epoch"
    SEED: Final = "seed"
    VALIDATE: Final = "validate"


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
    Keys.RESPONSE_MASK: Field(("B", "R"), _INT, "1 on tokens that the policy wrote (the end token too), else 0"),
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
