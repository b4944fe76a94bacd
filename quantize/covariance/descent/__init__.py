"""Descent over the codes of a type: single codes, fours of even parity, whole vectors, pairs."""
