"""Random inputs, and how a test finds them again in an oracle's answers.

A case is a dictionary of tensors; in the file a name is `<case>/<field>`. Cases: `padded` (responses of different
lengths), `gaps` (and tokens in the middle that the policy did not write), `extreme` (log-ratios of +-30 too).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

CASES = ("padded", "gaps", "extreme")
ROWS, WIDTH, VOCABULARY, HIDDEN = 12, 17, 23, 6
# gamma, lambda
DISCOUNTS = ((1.0, 1.0), (0.99, 0.95), (0.5, 0.0))
SETTINGS = {
    "clip_low": 0.2,
    "clip_high": 0.28,
    "clip_dual": 3.0,
    "gspo_low": 0.003,
    "gspo_high": 0.004,
    "clip_value": 0.5,
    "overlong_buffer": 8.0,
    "overlong_factor": 0.5,
    "kl_coefficient": 0.05,
    "kl_target": 0.1,
    "kl_horizon": 10_000.0,
}
# Mean KL and number of sequences of five batches.
KL_HISTORY = ((0.3, 64.0), (0.105, 64.0), (0.02, 256.0), (-0.4, 64.0), (0.1, 64.0))

# Responses to a prompt of GSM8K: marked, not marked, far from the end, with commas, points and signs.
GSM8K_TRUTH = "72"
GSM8K_RESPONSES = (
    "24 * 3 = 72\n#### 72",
    "#### 72.",
    "####72",
    "#### $72",
    "#### 7,2",
    "#### -72",
    "#### 71 and then #### 72",
    "#### 72 and then #### 71",
    "#### 72" + " " * 300,
    "x" * 290 + "#### 72",
    "the answer is 72",
    "the answer is 72.",
    "the answer is 72 .",
    "the answer is 7,2",
    "72 of 80",
    "-72",
    "...",
    ". . .",
    ", .",
    "no number",
    "",
)


def make_case(name: str) -> dict[str, Tensor]:
    """Return the tensors [B, R] (logits [B, R, V]) of a case; float32, but for mask, labels and groups: int64."""
    generator = torch.Generator().manual_seed(CASES.index(name))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    lengths = torch.randint(2, WIDTH + 1, (ROWS, 1), generator=generator)
    mask = torch.arange(WIDTH) < lengths
    if name == "gaps":
        mask &= torch.rand(ROWS, WIDTH, generator=generator) < 0.7
        mask[:, 0] = True
    case = {
        key: normal(ROWS, WIDTH) for key in ("rewards", "values", "new_values", "returns", "advantages", "log_prob")
    }
    case["old_log_prob"] = case["log_prob"] - 0.7 * normal(ROWS, WIDTH)
    if name == "extreme":
        case["old_log_prob"][:, 0] += 30 * normal(ROWS).sign()
    case["ref_log_prob"] = case["log_prob"] + 0.5 * normal(ROWS, WIDTH)
    case["score"] = normal(ROWS)
    case["hidden"] = normal(ROWS, WIDTH, HIDDEN)
    case["output_layer"] = normal(VOCABULARY, HIDDEN)
    case["logits"] = case["hidden"] @ case["output_layer"].T
    case["labels"] = torch.randint(VOCABULARY, (ROWS, WIDTH), generator=generator)
    # Groups of 4, 4, 3 and a lonely sample, not side by side.
    case["groups"] = torch.tensor([0, 1, 2] * 4)
    case["groups"][-1] = 3
    return {**case, "rewards": case["rewards"] * mask, "mask": mask.long()}


def to_file(cases: Mapping[str, Mapping[str, Tensor]]) -> dict[str, np.ndarray]:
    """Return the cases and the settings as an oracle's script reads them."""
    arrays = {f"{name}/{key}": value.numpy() for name, case in cases.items() for key, value in case.items()}
    settings = {f"settings/{key}": np.asarray(value) for key, value in SETTINGS.items()}
    gsm8k = {"gsm8k/truth": np.asarray(GSM8K_TRUTH), "gsm8k/responses": np.asarray(GSM8K_RESPONSES)}
    return {**arrays, **settings, **gsm8k, "discounts": np.asarray(DISCOUNTS), "kl_history": np.asarray(KL_HISTORY)}
