"""The computation of one process: training (`train`), generation with vLLM (`rollout`), weight transfer (`weights`).

Called by the worker groups, whose Ray actors hold one engine each. No Ray here: everything runs in plain processes, and
so do its tests. `train` and `rollout` never import each other; code that both need is in this folder's modules.
"""
