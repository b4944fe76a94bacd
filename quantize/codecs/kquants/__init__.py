"""The k-quants: superblocks of 256 with quantised scales."""
