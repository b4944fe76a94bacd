"""Tokenizers and vocabularies, chat templates, conversations."""
