"""Notes and warnings while a call is running; names and JSON as text.

Notes and warnings go through the logger `ggufmill`, at the levels INFO and WARNING. Without any set-up of `logging`, warnings
appear on stderr and notes do not. The command line prints both; with --json it leaves out those of the logger
`ggufmill.details`: the result says the same, or they are for people only.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

NAME, DETAILS = "ggufmill", "ggufmill.details"
_ITEMS = 1000  # of a list that become text at a time


def _logger(detail: bool) -> logging.Logger:
    return logging.getLogger(DETAILS if detail else NAME)


def note(text: str, *, detail: bool = False) -> None:
    """Something worth knowing: what was taken over from an earlier call, what an input covers."""
    _logger(detail).info("%s", text)


def warn(texts: Sequence[str], *, detail: bool = False) -> None:
    """Something that may be wrong: a rule without effect, figures that are doubtful."""
    for text in texts:
        _logger(detail).warning("%s", text)


def perplexity_text(perplexity: float) -> str:
    """'perplexity 5.1234'; of NaN that the model predicts no tokens."""
    return "without a perplexity: the model predicts no tokens" if math.isnan(perplexity) else f"perplexity {perplexity:.4f}"


def printable(text: str) -> str:
    """The text with escapes for what a terminal would act on or could not show: names come from whatever a file says."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def json_pieces(fields: dict[str, Any]) -> Iterator[str]:
    """The text of a JSON object in pieces, as `json_text` makes it; values that are iterators become lists."""
    for number, (key, value) in enumerate(fields.items()):
        yield f"{', ' if number else '{'}{json_text(key)}: "
        if isinstance(value, Iterator):
            yield "["
            between = ""
            while some := list(islice(value, _ITEMS)):
                yield between + json_text(some)[1:-1]
                between = ", "
            yield "]"
        else:
            yield json_text(value)
    yield "}" if fields else "{}"


def json_text(value: Any, indent: int | None = None) -> str:
    """JSON with null for NaN and infinity."""
    try:
        return json.dumps(value, allow_nan=False, indent=indent)
    except ValueError:
        return json.dumps(_finite(value), allow_nan=False, indent=indent)


def _finite(value: Any) -> Any:
    """The same with None in place of every NaN and infinity, which JSON does not have."""
    if isinstance(value, dict):
        return {key: _finite(v) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
