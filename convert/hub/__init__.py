"""Checkpoints on the Hugging Face hub: download, remote reading, deleting shards that were converted."""
