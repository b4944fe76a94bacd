"""Text generation: sampling and the decoding loop."""
