"""Generating with vLLM 0.26 to 0.32, on CUDA and on the CPU. The only place that imports vLLM."""
