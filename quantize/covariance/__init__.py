"""Encoding rows so that their error is small under the covariance of the matrix's inputs."""
