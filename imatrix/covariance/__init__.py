"""Covariances of the inputs of a model's matrices: collected over a text, in files, read, merged, described."""

from .files import CovarianceFile, is_covariance, open_covariance

__all__ = ["CovarianceFile", "is_covariance", "open_covariance"]
