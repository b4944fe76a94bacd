"""Flash attention over rows of the KV cache."""
