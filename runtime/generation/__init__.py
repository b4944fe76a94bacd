"""Generating text: sampling and the decoding loop."""
