"""Exports a tiny model as a job does, and asks transformers and vLLM to answer a chat; prints what was seen as JSON.

`separate_process.seen_by` runs it with the argument FOLDER. See test_served_export.py.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

from ppojob_api.v1alpha1.runtime import Device
from ppojob_trainer.engines.rollout.options import RolloutOptions, environment
from tests.integration.trainer.separate_process import print_seen

TEMPLATE = (
    "{% for message in messages %}<{{ message['content'] }}>{% endfor %}{% if add_generation_prompt %}:{% endif %}"
)
QUESTION = [{"role": "user", "content": "6 * 7"}]
NUM_TOKENS = 8


class Actor:
    """The actor's group with one rank, in this process."""

    def __init__(self, policy: Any) -> None:
        self.policy = policy
        self.group = self.actor = self

    async def call(self, method: object, folder: Path) -> None:
        self.policy.export(folder)


def export(root: Path) -> Path:
    """Write a model, export it by the code of a run, and return the folder."""
    from ppojob_api.v1alpha1.algorithm import AlgorithmSpec
    from ppojob_api.v1alpha1.resolve import JobFile, resolve
    from ppojob_api.v1alpha1.training import ActorSpec
    from ppojob_api.v1alpha1.validation import parse_spec
    from ppojob_trainer.engines.network import listen
    from ppojob_trainer.engines.train.dims import ParallelDims
    from ppojob_trainer.engines.train.mesh import init_process_group
    from ppojob_trainer.main.exports import JobExports
    from ppojob_trainer.telemetry import RunFiles
    from tests.good_spec import GOOD
    from tests.integration.trainer.tiny_model import write_tiny_model
    from tests.unit.trainer.engines.fsdp_engines import policy_engine

    base = write_tiny_model(root / "base")
    parallel = init_process_group(Device.CPU, 0, ParallelDims(), listen("127.0.0.1", 60), 60)
    data = {**GOOD["spec"]["data"], "chatTemplate": TEMPLATE}
    model = {"actor": {"path": str(base), "lora": {"rank": 4}}}
    spec = resolve(parse_spec({**GOOD["spec"], "data": data, "model": model}))
    policy = policy_engine(
        parallel, spec.model.actor, ActorSpec(max_tokens_per_gpu=1024), AlgorithmSpec(), total_steps=1
    )
    job = JobFile(namespace="team", name="served", uid="u", root=str(root), spec=spec)
    exports = JobExports(job, Actor(policy), RunFiles(root), 0, lambda: None)  # type: ignore[arg-type]
    return asyncio.run(exports.export(1, 1))


def seen_by_transformers(folder: Path) -> dict[str, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, tokenize=False)
    tokens = tokenizer(prompt, return_tensors="pt")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    written = model.generate(**tokens, max_new_tokens=NUM_TOKENS, do_sample=False)
    return {"prompt": prompt, "written": written[0, tokens["input_ids"].shape[1] :].tolist()}


def seen_by_vllm(folder: Path) -> dict[str, Any]:
    from vllm import LLM, SamplingParams

    engine: Any = LLM(model=str(folder), dtype="float32", enforce_eager=True, max_model_len=64, seed=0)
    sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS)
    [answer] = engine.chat([QUESTION], sampling)
    tokenizer = engine.get_tokenizer()
    return {"prompt": tokenizer.decode(answer.prompt_token_ids), "written": list(answer.outputs[0].token_ids)}


def main() -> None:
    root = Path(sys.argv[1])
    os.environ.update(environment(RolloutOptions(path=str(root), device=Device.CPU, max_model_len=64), num_threads=1))
    folder = export(root)
    found = {"transformers": seen_by_transformers(folder), "vllm": seen_by_vllm(folder)}
    print_seen(found)


if __name__ == "__main__":
    main()
