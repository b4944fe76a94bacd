"""Encoders and decoders of every tensor type."""
