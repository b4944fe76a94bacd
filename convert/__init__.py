"""Hugging Face checkpoints as sources of GGUF tensors and metadata; one module per architecture family."""

from .source import open_source

__all__ = ["open_source"]
