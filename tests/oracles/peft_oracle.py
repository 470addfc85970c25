"""peft on the adapters and inputs of a file. Arguments: INPUTS ANSWERS (npz). Imports nothing of ours."""

from __future__ import annotations

import sys

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM


def load(path: str) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model


def main(inputs: str, answers: str) -> None:
    given = np.load(inputs)
    model_path, adapter_path = str(given["model"]), str(given["adapter"])
    model = PeftModel.from_pretrained(load(model_path), adapter_path)
    names = ("input_ids", "attention_mask", "position_ids")
    with torch.no_grad():
        found = {"logits": model(**{name: torch.from_numpy(given[name]) for name in names}).logits}
    # With the names of HuggingFace checkpoints, in which each expert is by itself.
    model.merge_and_unload().save_pretrained(str(given["merged"]))
    config = LoraConfig(r=4, lora_alpha=12, target_modules="all-linear", task_type="CAUSAL_LM")
    fresh = get_peft_model(load(model_path), config)
    adapters = {name.replace(".default", ""): value for name, value in fresh.named_parameters() if "lora_" in name}
    found |= {f"fresh/{name}": value.detach() for name, value in adapters.items()}
    np.savez(answers, **{name: value.numpy() for name, value in found.items()})


if __name__ == "__main__":
    main(*sys.argv[1:])
