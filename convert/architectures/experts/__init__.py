"""Mixtures of experts with ordinary attention."""
