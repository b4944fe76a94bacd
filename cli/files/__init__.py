"""Verbs that look into GGUF files, and rewrite them without encoding anything."""
