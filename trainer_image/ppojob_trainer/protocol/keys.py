"""The names of all columns that go between worker groups. They are verl's, so that code and habits carry over.

`fields` has the dtypes and lengths.
"""

from typing import Final


class Keys:
    """Names of the columns of a `DataProto`: tensors, and object arrays of length B."""

    # Tensors: the tokens. PROMPT_IDS has those of the prompt, INPUT_IDS those of prompt and response.
    PROMPT_IDS: Final = "prompt_ids"
    INPUT_IDS: Final = "input_ids"
    RESPONSE_MASK: Final = "response_mask"
    # Tensors: what the models and the reward say about each response token.
    ROLLOUT_LOG_PROBS: Final = "rollout_log_probs"
    # Absent unless the weights of the engines change while they generate.
    ROLLOUT_VERSIONS: Final = "rollout_versions"
    # Absent without `rollout.routingReplay`.
    ROUTED_EXPERTS: Final = "routed_experts"
    OLD_LOG_PROBS: Final = "old_log_probs"
    REF_LOG_PROB: Final = "ref_log_prob"
    ENTROPYS: Final = "entropys"
    VALUES: Final = "values"
    FUNCTION_SCORES: Final = "function_scores"
    MODEL_SCORES: Final = "model_scores"
    TOKEN_LEVEL_SCORES: Final = "token_level_scores"
    ADVANTAGES: Final = "advantages"
    RETURNS: Final = "returns"
    # Non-tensors: the prompt.
    RAW_PROMPT: Final = "raw_prompt"
    # Name of the source in data.train.mixture; "" without a mixture, and for validation.
    SOURCE: Final = "source"
    DATA_SOURCE: Final = "data_source"
    GROUND_TRUTH: Final = "ground_truth"
    EXTRA_INFO: Final = "extra_info"
    # Non-tensors of the reward function: why it gave no score, "" where it did; a dict of what it returned beside it.
    REWARD_ERROR: Final = "reward_error"
    REWARD_EXTRAS: Final = "reward_extras"
    # Non-tensors: identity. UID names the prompt's occurrence (all samples of one prompt share it: the group of GRPO
    # and RLOO), INDEX the row of the source, SAMPLE_INDEX which of the prompt's samples a sequence is.
    UID: Final = "uid"
    INDEX: Final = "index"
    SAMPLE_INDEX: Final = "sample_index"


class Meta:
    """Names in `DataProto.meta_info`: small values that hold for the whole batch."""

    # dict[str, list[float]]; of the meta_info that a method returns with rows, only this reaches the controller.
    METRICS: Final = "metrics"
    TEMPERATURE: Final = "temperature"
    GLOBAL_STEP: Final = "global_step"
    EPOCH: Final = "epoch"
