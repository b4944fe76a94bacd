"""Messages while a call is running, through the logger `ggufmill`: notes at level INFO, warnings at level WARNING.

Without any set-up of `logging`, warnings appear on stderr and notes do not. The command line prints both; with --json it leaves
out those of the logger `ggufmill.details`: the result says the same, or they are for people only.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

NAME, DETAILS = "ggufmill", "ggufmill.details"


def _logger(detail: bool) -> logging.Logger:
    return logging.getLogger(DETAILS if detail else NAME)


def note(text: str, *, detail: bool = False) -> None:
    """Something worth knowing: what was taken over from an earlier call, what an input covers."""
    _logger(detail).info("%s", text)


def warn(texts: Sequence[str], *, detail: bool = False) -> None:
    """Something that may be wrong: a rule without effect, figures that are doubtful."""
    for text in texts:
        _logger(detail).warning("%s", text)
