"""The least time that each phase can take on a device: operations at its peak, bytes at its memory's bandwidth.

Formulas as in `fsdp.flops` (PaLM, appendix B), with what is recomputed, because the phase does it: the layers
with gradient checkpointing, the output layer always, because it is never held. A mixture computes the experts that a
token uses. Generation: for each token that all sequences generate, the weights and the sequences' keys and values are
read once. The weights cross NVLink once. Called by `report`.
"""

from __future__ import annotations

from collections.abc import Mapping

from tests.bench.workload import KEY_VALUE_HEADS, Size

# Bytes per second of the memory, from the vendor's data sheets, by a part of the device's name.
BANDWIDTH = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.0e12}
# Bytes per second of all NVLinks of a GPU in one direction: half of what the data sheets give for both directions
# together (H100 and H200 SXM: 900 GB/s, A100: 600 GB/s).
NVLINK = {"H200": 450e9, "H100": 450e9, "A100": 300e9}


def floors(
    shape: Mapping[str, int], size: Size, gpus: Mapping[str, int], recomputes: Mapping[str, bool]
) -> dict[str, float]:
    """Return `floors_of` this machine's device; empty where its figures are not known.

    Varied responses have the floor of the weights alone: how many tokens there were is not known beforehand.
    """
    # Not above: who only asks for a layout need not wait for torch.
    import torch

    from ppojob_trainer.engines.train.fsdp.flops import peak_flops

    if not torch.cuda.is_available():
        return {}
    device = torch.device("cuda", 0)
    peak = peak_flops(device)
    name = torch.cuda.get_device_name(device)
    model = next((part for part in BANDWIDTH if part in name), None)
    if peak is None or model is None:
        return {}
    least = {} if size.is_varied else floors_of(shape, size, peak, BANDWIDTH[model], gpus, recomputes)
    return least | {"update_weights": sync_floor(shape, size, NVLINK[model])}


def sync_floor(shape: Mapping[str, int], size: Size, bandwidth: float) -> float:
    """Return the seconds in which a replica's bfloat16 weights cross a link of so many bytes per second."""
    return 2 * num_parameters(shape, size) / bandwidth


def num_parameters(shape: Mapping[str, int], size: Size) -> int:
    """Return the parameters of the matrices, and of embeddings and output layer, which a shape shares by default."""
    tables = 1 if shape.get("tie_word_embeddings", True) else 2
    return _matrices(shape) + tables * size.vocabulary * shape["hidden_size"]


def _matrices(shape: Mapping[str, int], *, active: bool = False) -> int:
    """Return the parameters of the layers; of a mixture with all experts, or (`active`) with those of one token."""
    hidden = shape["hidden_size"]
    per_layer = 2 * hidden * _queries(shape) + hidden * _key_values(shape)
    if experts := shape.get("num_experts", shape.get("num_local_experts")):
        expert = 3 * hidden * shape.get("moe_intermediate_size", shape["intermediate_size"])
        per_layer += expert * (shape["num_experts_per_tok"] if active else experts) + hidden * experts
    else:
        per_layer += 3 * hidden * shape["intermediate_size"]
    return shape["num_hidden_layers"] * per_layer


def _cached(shape: Mapping[str, int], length: float) -> float:
    """Return how many of so many tokens a layer reads; with a sliding window, every second layer reads no more."""
    return (length + min(length, shape.get("sliding_window", length))) / 2


def _attended(shape: Mapping[str, int], length: int) -> float:
    """Return how many tokens each of so many reads on average; with a sliding window in every second layer."""
    window = min(length, shape.get("sliding_window", length))
    return (length / 2 + window * (1 - window / (2 * length))) / 2


def _queries(shape: Mapping[str, int]) -> int:
    """Return the numbers of a token's queries in a layer, of all heads."""
    return shape["num_attention_heads"] * _head(shape)


def _key_values(shape: Mapping[str, int]) -> int:
    """Return the numbers that a layer holds of a token: keys and values of all heads that have their own."""
    return 2 * shape.get("num_key_value_heads", KEY_VALUE_HEADS) * _head(shape)


def _head(shape: Mapping[str, int]) -> int:
    return shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])


def floors_of(
    shape: Mapping[str, int],
    size: Size,
    peak: float,
    bandwidth: float,
    gpus: Mapping[str, int],
    recomputes: Mapping[str, bool],
) -> dict[str, float]:
    """Return seconds by phase, of the roles that there are.

    Args:
        shape: the model's, see `workload.SHAPES`.
        peak: operations per second of a GPU.
        bandwidth: bytes per second of its memory.
        gpus: of the roles actor and rollout, and of critic and ref if the job has them.
        recomputes: of actor and critic, whether gradient checkpointing has the layers computed again.
    """
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    matrices, computed = _matrices(shape), _matrices(shape, active=True)
    output = size.vocabulary * hidden
    length = size.prompt_tokens + size.response_tokens
    tokens, written = size.num_prompts * length, size.num_prompts * size.response_tokens
    attention = 4 * layers * _queries(shape) * _attended(shape, length) * tokens
    backbone = 2 * computed * tokens + attention
    head_cost = 2 * output * written
    # For each of the generated places, all weights are read once (all experts: some sequence uses each of them), and
    # every sequence's keys and values.
    mean_length = size.prompt_tokens + size.response_tokens / 2
    cache = size.num_prompts / gpus["rollout"] * _cached(shape, mean_length) * layers * _key_values(shape) * 2
    generation = size.response_tokens * ((matrices + output) * 2 + cache) / bandwidth
    least = {"gen": generation}
    # An update: forward, forward again where it is recomputed, and backward, which is twice a forward.
    operations = {
        ("old_log_prob", "actor"): backbone + head_cost,
        ("ref", "ref"): backbone + head_cost,
        ("values", "critic"): backbone,
        ("update_actor", "actor"): (3 + recomputes["actor"]) * backbone + 4 * head_cost,
        ("update_critic", "critic"): (3 + recomputes["critic"]) * backbone,
    }
    return least | {phase: cost / peak / gpus[role] for (phase, role), cost in operations.items() if role in gpus}
