"""The runtime's inner loops: quantised activations, matrix-vector and matrix-matrix products over packed weights."""
