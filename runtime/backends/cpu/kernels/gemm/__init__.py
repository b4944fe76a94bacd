"""Matrix-matrix products of many tokens with packed weights."""
