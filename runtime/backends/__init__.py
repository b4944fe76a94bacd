"""What runs a model graph."""
