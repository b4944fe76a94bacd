"""The version of this program; docs/release.py sets it."""

__version__ = "0.1.0"
