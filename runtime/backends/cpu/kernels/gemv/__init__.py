"""Matrix-vector products of a few tokens with packed weights."""
