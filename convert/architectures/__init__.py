"""One module per model family: how its checkpoint becomes GGUF tensors and metadata."""
