"""The covariance of a matrix's inputs, and what is computed of it alone: panels, factors, the matrix of feedback."""
