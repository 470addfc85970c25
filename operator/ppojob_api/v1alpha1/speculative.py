"""How drafts make generation faster: `spec.rollout.speculative`."""

from enum import StrEnum

from pydantic import ConfigDict, Field

from ppojob_api.v1alpha1.base import ApiModel, Rule, rules


class SpeculativeMethod(StrEnum):
    """How tokens are drafted."""

    NGRAM = "NGram"


class SpeculativeSpec(ApiModel):
    """Speculative decoding: tokens are drafted, and the model checks all of them in one step. It keeps those that it
    samples itself, so a seed samples the same response with and without drafts, but for rounding."""

    model_config = ConfigDict(
        json_schema_extra=rules(
            Rule(
                rule="self.promptLookupMin <= self.promptLookupMax",
                message="must not be above promptLookupMax",
                field_path=".promptLookupMin",
            )
        )
    )

    method: SpeculativeMethod = SpeculativeMethod.NGRAM
    """NGram: the tokens that followed the last ones where these occurred before, in the prompt or the response."""
    num_speculative_tokens: int = Field(default=4, ge=1, le=32)
    """Tokens that are drafted for each step of a response."""
    prompt_lookup_min: int = Field(default=2, ge=1, le=64)
    """Fewest last tokens that must have occurred before."""
    prompt_lookup_max: int = Field(default=4, ge=1, le=64)
    """Most last tokens that are looked up; the longest match decides."""
    max_num_seqs: int = Field(default=32, ge=1, le=1_048_576)
    """Drafts are tried while a replica has at most this many sequences, for which a step takes nearly as long as for
    one. They are used where measured steps with drafts generate more tokens per second than those without."""
