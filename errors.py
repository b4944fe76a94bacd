"""Errors that a user may see: one line each, saying what is wrong, where, and what to do."""

from __future__ import annotations

from typing import Any

# package that only some work needs -> the extra that brings it, with whatever else that work needs (pyproject.toml)
EXTRAS = {
    "cryptography": "cluster",
    "distributed": "cluster",
    "llguidance": "serve",
    "matplotlib": "plot",
    "prometheus-client": "serve",
    "pyarrow": "parquet",
    "starlette": "serve",
    "torch": "gpu",
    "uvicorn": "serve",
}


def installation(package: str) -> str:
    """The command that installs a package of EXTRAS."""
    return f"pip install 'ggufmill[{EXTRAS[package]}]'"


class MillError(Exception):
    """An error that the user can act on. The command line prints its text as one line and exits with code 1.

    Unprintable characters are escaped, since the text may quote names from a damaged file.
    """

    def __init__(self, text: str):
        super().__init__("".join(c if c.isprintable() else ascii(c)[1:-1] for c in text))


class FormatError(MillError):
    """A file is truncated, malformed, or of an unsupported kind."""


class PlanError(MillError):
    """A job cannot be done as requested. Raised before anything is written."""


class UsageError(PlanError):
    """Arguments contradict each other, or one of them would do nothing as given. The command line exits with 2."""


class CheckFailed(MillError):
    """The work is done, and a check that belongs to it failed: damaged tensors, other checksums, limits that are exceeded.

    result: what the function would have returned, with everything that was found.
    """

    def __init__(self, text: str, result: Any):
        super().__init__(text)
        self.result = result
