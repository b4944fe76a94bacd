"""The i-quants: codebooks (iq1, iq2, iq3) and the non-uniform table of iq4_nl and iq4_xs."""
