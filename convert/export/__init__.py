"""From a GGUF back to a Hugging Face checkpoint."""
