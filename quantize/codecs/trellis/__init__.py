"""The trellis types iq1_kt to iq4_kt of ik_llama.cpp."""
