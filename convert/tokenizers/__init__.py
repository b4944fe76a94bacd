"""Tokenizer files of checkpoints to tokenizer.* metadata."""
