"""ggufmill: from a Hugging Face checkpoint to a validated, recipe-quantised, repacked GGUF."""

__version__ = "0.1.0"
