"""Decoders of the years before Llama, with LayerNorm, biases, fused queries, keys and values."""
