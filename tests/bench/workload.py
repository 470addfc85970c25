"""Workload W: what the benchmark trains, made from nothing, so that it needs neither a hub nor a data set.

A Qwen2 of 0.5B, 1.5B, 7B or 32B (random weights, vocabulary 151,936), prompts of exactly 130 tokens, responses of
exactly 512 (the end of sequence is ignored), PPO with GAE and a critic, 4 minibatches, bfloat16, gradient
checkpointing. verl does the same work (`verl_run`). Varied, the responses end by chance, as those of a real task do:
the model's generation settings have many tokens that end a sequence.
`30B-A3B` is a Qwen3 mixture of experts with the sizes of Qwen3-30B-A3B, `4B-A0.9B` a smaller one whose experts are as
large, and `7B-A1B` one with the layers and experts of OLMoE-1B-7B. `20B-A3.6B` has the sizes of gpt-oss-20b, except
for the vocabulary.
Called by `bench_split` and `bench_host_memory`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import string
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ppojob_trainer.commands.kubernetes_yaml import parse

NUM_PROMPTS = 256
PROMPT_TOKENS = 130
TEMPLATE_TOKENS = 2
"""Of the chat template; each other token of a prompt is a letter."""
RESPONSE_TOKENS = 512
NUM_MINIBATCHES = 4
VOCABULARY = 151_936
KEY_VALUE_HEADS = 2
"""Of a shape that does not name them."""
VARIED_MEAN = 0.4
"""Mean length of varied responses before the longest are cut, as a share of the most tokens."""

SHAPES: dict[str, dict[str, int]] = {
    "0.5B": {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
    "1.5B": {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
    "7B": {
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_hidden_layers": 28,
        "num_attention_heads": 28,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
    },
    "32B": {
        "hidden_size": 5120,
        "intermediate_size": 27648,
        "num_hidden_layers": 64,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "4B-A0.9B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 12,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    },
    "7B-A1B": {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 64,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1024,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "30B-A3B": {
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
    "20B-A3.6B": {
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
        "max_position_embeddings": 131_072,
        "tie_word_embeddings": False,
    },
    # For trying the benchmark itself on a machine without a GPU.
    "tiny": {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2},
    "tiny-experts": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "num_experts": 8,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}
"""Settings of a model's configuration; `family` says of which kind of model."""
# A processor takes minutes for them.
_DRAWN_ON_GPU = frozenset({"7B", "32B", "4B-A0.9B", "7B-A1B", "20B-A3.6B", "30B-A3B"})
_NUM_BYTES = 256
_SPECIAL = ("<|endoftext|>", "<|user|>", "<|assistant|>")
REWARD = '''"""A reward that costs nothing and depends on the response alone."""


def compute_score(*, data_source, solution_str, ground_truth, extra_info):
    words = solution_str.split()
    return sum(len(word) % 2 for word in words) / max(1, len(words))
'''


@dataclass(frozen=True)
class Size:
    """How much work a step is.

    is_varied: responses end by chance, and `response_tokens` is the most that they have. contrast: factor of the output
    layer's random weights (if it is the embedding, also of that). With 1, all tokens are about equally probable, so
    log-probs that two programs compute for a response are close whatever they do.
    """

    shape: str = "0.5B"
    num_prompts: int = NUM_PROMPTS
    prompt_tokens: int = PROMPT_TOKENS
    response_tokens: int = RESPONSE_TOKENS
    vocabulary: int = VOCABULARY
    is_varied: bool = False
    contrast: float = 1.0


def family(shape: Mapping[str, int]) -> str:
    """Return the type of a shape's model, by transformers' name: each family has its name for the number of experts."""
    if "num_local_experts" in shape:
        return "gpt_oss"
    return "qwen3_moe" if "num_experts" in shape else "qwen2"


def size_of(shape: str) -> Size:
    """Return the size of the workload for a shape; a small one for tiny shapes."""
    return Size(shape, 8, 16, 16, 512) if shape.startswith("tiny") else Size(shape)


def prepare(folder: Path, size: Size, num_steps: int, *, layers: int | None = None) -> None:
    """Write model, tokenizer, prompts and reward function into `folder`, unless they are there.

    Args:
        layers: decoder layers of the model, where they are not those of the shape.

    Raises:
        RuntimeError: the model could not be made.
    """
    if not (folder / "finished").exists():
        _prepare(folder, size, num_steps, layers)
    # Each time: the folder may be that of a run with other lengths.
    _write_ends(folder / "model", size)


def _prepare(folder: Path, size: Size, num_steps: int, layers: int | None) -> None:
    shape = SHAPES[size.shape] | ({} if layers is None else {"num_hidden_layers": layers})
    # In a separate process, so that the GPU's memory is free before a run begins.
    maker = multiprocessing.get_context("spawn").Process(target=_write_model, args=(folder / "model", size, shape))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise RuntimeError(f"the model could not be made in {folder}")
    generator = random.Random(1)
    num_letters = size.prompt_tokens - TEMPLATE_TOKENS
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for index in range(size.num_prompts * num_steps):
            text = "".join(generator.choices(string.ascii_letters, k=num_letters))
            row = {
                "data_source": "workload",
                "prompt": [{"role": "user", "content": text}],
                "reward_model": {"style": "rule", "ground_truth": ""},
                "extra_info": {"index": index},
            }
            file.write(json.dumps(row) + "\n")
    (folder / "reward.py").write_text(REWARD, encoding="utf-8")
    (folder / "finished").touch()


def set_fields(spec: dict[str, Any], settings: Iterable[str]) -> None:
    """Set fields of a job's spec, such as `actor.maxTokensPerGPU=8192`: each value is YAML, as Kubernetes reads it."""
    for setting in settings:
        path, value = setting.split("=", 1)
        *sections, field = path.split(".")
        target = spec
        for section in sections:
            target = target.setdefault(section, {})
        target[field] = parse(value)


def needs_reward_model(layout: Mapping[str, Any]) -> bool:
    """Whether a layout scores with a model."""
    return "type" in layout.get("reward", {})


def _write_model(folder: Path, size: Size, shape: Mapping[str, int]) -> None:
    import torch
    from tokenizers import pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.qwen2.tokenization_qwen2 import Qwen2Tokenizer

    # A token for each byte and no merges, so that a letter is a token; the rest of the vocabulary are fillers.
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: number for number, letter in enumerate(letters)}
    vocabulary |= {f"<filler {number}>": len(letters) + number for number in range(_num_fillers(size))}
    vocabulary |= {word: len(vocabulary) + number for number, word in enumerate(_SPECIAL)}
    tokenizer = Qwen2Tokenizer(vocab=vocabulary, merges=[])
    tokenizer.add_special_tokens({"additional_special_tokens": list(_SPECIAL[1:])})
    tokenizer.chat_template = "{% for m in messages %}<|user|>{{ m['content'] }}{% endfor %}<|assistant|>"
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    settings: dict[str, Any] = {
        "max_position_embeddings": 32_768,
        "num_key_value_heads": KEY_VALUE_HEADS,
        "tie_word_embeddings": True,
        **shape,
    }
    config = AutoConfig.for_model(
        family(shape),
        vocab_size=size.vocabulary,
        rope_theta=1e6,
        eos_token_id=vocabulary["<|endoftext|>"],
        **settings,
    )
    if size.shape in _DRAWN_ON_GPU and torch.cuda.is_available():
        with torch.device("cuda"):
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    else:
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    with torch.no_grad():
        model.get_output_embeddings().weight *= size.contrast
    model.save_pretrained(folder, max_shard_size="4GB")
    _let_others_read(folder)


def prepare_reward_model(folder: Path, size: Size) -> None:
    """Write a reward model of the same shape (random weights) beside the model, unless it is there."""
    target = folder / "reward-model"
    if (target / "finished").exists():
        return
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen2ForSequenceClassification

    AutoTokenizer.from_pretrained(folder / "model").save_pretrained(target)
    torch.manual_seed(1)
    config = AutoConfig.from_pretrained(folder / "model", num_labels=1)
    config.pad_token_id = config.eos_token_id
    Qwen2ForSequenceClassification(config).to(torch.bfloat16).save_pretrained(target)
    _let_others_read(target)
    (target / "finished").touch()


def let_repeat(folder: Path, share: float) -> None:
    """Let the model of a workload sample its last token again with this probability.

    The layers still compute, but add nothing, so the last token's own logit is by far the largest. The size of the
    embeddings, which are those of the output too, decides how often it is sampled.
    """
    import torch
    from safetensors.torch import load_file, save_file

    file = folder / "model" / "model.safetensors"
    added = ("o_proj.weight", "down_proj.weight")
    weights = {name: value * (0 if name.endswith(added) else 1) for name, value in load_file(file).items()}
    embeddings = weights["model.embed_tokens.weight"].float()
    some = torch.arange(0, len(embeddings), max(1, len(embeddings) // 64))
    logits = (embeddings[some] / embeddings[some].square().mean(1, keepdim=True).sqrt()) @ embeddings.T
    own = logits[torch.arange(len(some)), some]
    low, high = 0.05, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        repeated = float((own / middle - (logits / middle).logsumexp(1)).exp().mean())
        low, high = (middle, high) if repeated > share else (low, middle)
    weights["model.embed_tokens.weight"] /= low
    save_file(weights, file, {"format": "pt"})
    _let_others_read(folder / "model")


def ends(size: Size) -> list[int]:
    """Return the tokens that end a varied response: each token of it is one of them with the same probability, because
    random weights draw nearly all tokens equally often. So its length is geometric, and cut.
    """
    number = max(1, round(size.vocabulary / (VARIED_MEAN * size.response_tokens)))
    end_of_text = _NUM_BYTES + _num_fillers(size)
    return [end_of_text, *range(_NUM_BYTES, _NUM_BYTES + number - 1)]


def _write_ends(model: Path, size: Size) -> None:
    """Write the tokens that end a response where engines read them: into the model's generation settings."""
    file = model / "generation_config.json"
    settings = json.loads(file.read_text(encoding="utf-8")) | {"eos_token_id": ends(size)}
    file.write_text(json.dumps(settings, indent=1), encoding="utf-8")


def _num_fillers(size: Size) -> int:
    return size.vocabulary - _NUM_BYTES - len(_SPECIAL)


def _let_others_read(folder: Path) -> None:
    # safetensors writes 0600, and pods run as another user.
    for file in folder.glob("*.safetensors"):
        file.chmod(0o644)


def job(folder: Path, size: Size, layout: Mapping[str, Any], num_steps: int, device: str) -> dict[str, Any]:
    """Return a PPOJob that trains the workload.

    Args:
        layout: `pools`, `placement`, `schedule`, and further sections that are merged over these.
    """
    is_cuda = device == "CUDA"
    minibatch = size.num_prompts // NUM_MINIBATCHES
    spec: dict[str, Any] = {
        "image": "none",
        "device": device,
        "model": {"actor": {"path": str(folder / "model")}, "critic": {}},
        "data": {
            "train": {"files": {"paths": [str(folder / "prompts.jsonl")]}},
            "trainBatchSize": size.num_prompts,
            "maxPromptLength": size.prompt_tokens,
            "maxResponseLength": size.response_tokens,
        },
        "reward": {"function": {"path": str(folder / "reward.py"), "numWorkers": 4 if is_cuda else 1}},
        "algorithm": {"kl": {"inReward": True}},
        "actor": {"miniBatchSize": minibatch, "maxTokensPerGPU": 49_152},
        "critic": {"miniBatchSize": minibatch, "maxTokensPerGPU": 49_152},
        "rollout": {
            "ignoreEos": not size.is_varied,
            "gpuMemoryUtilization": 0.4,
            "sleep": False,
            "maxNumSeqs": 256,
            "logProbs": False,
        },
        "storage": {"claimName": "none", "mountPath": str(folder)},
        "checkpoint": {"everySteps": 0, "export": "Never"},
        "trainer": {"totalSteps": num_steps, "validateEverySteps": 0},
    }
    for section, values in layout.items():
        spec[section] = {**spec.get(section, {}), **values} if isinstance(values, Mapping) else values
    if needs_reward_model(layout):
        spec["model"]["reward"] = {"path": str(folder / "reward-model")}
    return {"apiVersion": "ppojob.dev/v1alpha1", "kind": "PPOJob", "metadata": {"name": "bench"}, "spec": spec}
