"""The implementation of `ppojob`'s commands. Imports neither torch, Ray nor vLLM, so `ppojob validate` starts fast."""
