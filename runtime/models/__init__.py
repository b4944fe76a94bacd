"""Model architectures: from a model's tensors and metadata to its graph, one module per family."""
