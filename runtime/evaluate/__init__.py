"""Measures models: perplexity, KL divergence, errors of layers and weights, speed."""
