"""One process's work: training with FSDP2 (`fsdp`), generating with vLLM (`vllm`), and weights from one to the other.

Called by the worker groups, whose Ray actors hold one engine each. No Ray here: everything runs in plain processes,
and so do its tests. `fsdp` and `vllm` never import each other; what both need is in this folder's own modules.
"""
