"""Carrying out a plan: what it takes, the checks before and after, the files written."""
