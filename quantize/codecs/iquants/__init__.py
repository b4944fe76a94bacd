"""The i-quants: weights from codebooks of the iq1, iq2 and iq3 types, and the non-uniform table of iq4."""
