"""Searching a recipe for a given file size."""
