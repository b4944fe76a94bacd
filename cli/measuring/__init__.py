"""Verbs that measure models: their speed, their predictions, their vectors."""
