"""Models that make embeddings of texts: attention to all tokens, a pooling of their outputs, no head."""
