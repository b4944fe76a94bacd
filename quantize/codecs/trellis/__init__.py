"""The trellis types of ik_llama.cpp: groups of weights are vectors of a generated codebook."""
