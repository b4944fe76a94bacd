"""Architectures of 2026 whose blocks differ from those of Llama."""
