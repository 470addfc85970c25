"""Log-probs of the sampled tokens in vLLM's worker, by the kernel that gives the trainer its own log-probs.

The kernel of vLLM 0.32 reads a row of logits in 150 blocks of 1,024, twice, and waits for the sum over each block
before it begins the next. A decoding step has few rows, so these waits are not hidden by other rows.
`maths.softmax_cuda` reads the same row once, in 19 larger blocks. Called by `WeightReceiverExtension`.
"""

from __future__ import annotations

import torch


def use_trainers_kernel() -> None:
    """Let vLLM's second model runner, in this process, compute log-probs of sampled tokens with the trainer's kernel.

    Log-probs of further tokens, such as the most likely ones, remain vLLM's.
    """
    # They need Triton, which vLLM for the CPU does not have.
    from vllm.v1.worker.gpu.sample import logprob

    from ppojob_trainer.maths.softmax_cuda import statistics

    of_vllm = logprob.compute_token_logprobs

    def compute_token_logprobs(logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """In place of vLLM's: log-probs float32 [rows, n] of the tokens [rows, n], from logits [rows, vocabulary]."""
        if token_ids.shape[1] != 1:
            found: torch.Tensor = of_vllm(logits, token_ids)
            return found
        return statistics(logits.contiguous(), token_ids[:, 0].to(torch.int64), 1.0)[0].unsqueeze(1)

    vars(logprob)["compute_token_logprobs"] = compute_token_logprobs
