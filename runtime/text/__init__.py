"""Tokenizer, vocabulary, chat templates and conversations."""
