"""The computation of one process: training with FSDP2 (`fsdp`), generation with vLLM (`vllm`), weight transfer.

Called by the worker groups, whose Ray actors hold one engine each. No Ray here: everything runs in plain processes, and
so do its tests. `fsdp` and `vllm` never import each other; code that both need is in this folder's modules.
"""
