"""Formats in which checkpoints store quantised weights: fp8, GPTQ, AWQ, compressed-tensors, MXFP4 and others."""
