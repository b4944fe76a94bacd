"""Judging a model: perplexity, KL divergence, comparison of layers, speed."""
