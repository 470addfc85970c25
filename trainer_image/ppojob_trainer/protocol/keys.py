"""The names of all fields that go between worker groups. They are verl's, so that code and habits carry over.

`fields` has the shapes and dtypes.
"""

from typing import Final


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
    # Non-tensor: why the reward function gave no score, "" where it did. Absent with onError Fail.
    REWARD_ERROR: Final = "reward_error"
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
