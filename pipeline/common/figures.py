"""Figures as text: one way for each kind, in tables, lines, reports and cards.

A size is in bytes of the file, or of what a row names (the tensors of a type, of a device), in binary units: MiB, GiB; --json
has bytes. A standard error stands behind its value with ±. Shares are per cent with a space. Counts have commas.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SIZE, BITS, PERPLEXITY, DIVERGENCE, SAME_TOP = (
    "size",
    "bits/weight",
    "perplexity",
    "KL divergence",
    "same top token",
)  # headings
PERPLEXITY_DIGITS, DIVERGENCE_DIGITS, SHARE_DIGITS = 4, 5, 2


def size_text(nbytes: int) -> str:
    """'386.183 GiB', or MiB below one."""
    return f"{nbytes / 2**30:.3f} GiB" if nbytes >= 2**30 else f"{nbytes / 2**20:.3f} MiB"


def file_text(nbytes: int, files: int = 1) -> str:
    """'5.820 MiB (6,102,656 bytes)', and in how many files."""
    return f"{size_text(nbytes)} ({nbytes:,} bytes{f' in {files} files' if files > 1 else ''})"


def windows_text(windows: int, n_ctx: int, predictions: int | None = None) -> str:
    """'104 windows of 512 tokens, 26,520 predictions'."""
    scored = "" if predictions is None else f", {predictions:,} predictions"
    return f"{windows} window{'' if windows == 1 else 's'} of {n_ctx} tokens{scored}"


def bits_text(bits: float) -> str:
    """Bits per weight: '4.936'."""
    return f"{bits:.3f}"


def bits_per_weight_text(bits: float) -> str:
    """'4.936 bits per weight'."""
    return f"{bits_text(bits)} bits per weight"


def error_text(value: float | None, error: float | None, digits: int, unit: str = "") -> str:
    """'22.0917 ± 0.3802'; without an error, which a single prediction does not have, the value; '' for None."""
    if value is None:
        return ""
    return f"{value:.{digits}f}" + (f" ± {error:.{digits}f}" if error is not None else "") + unit


def share_text(share: float, digits: int = 1) -> str:
    """A fraction of one in per cent: '12.5 %'."""
    return f"{100 * share:.{digits}f} %"


def per_cent_text(value: float, digits: int = SHARE_DIGITS) -> str:
    """What is in per cent already: '93.89 %'."""
    return share_text(value / 100, digits)


def file_bytes_of(about: Mapping[str, Any]) -> int:
    """Bytes on disk of a model that `describe_model` describes; of an older description, which lacks them, of its tensors."""
    return int(about.get("file_bytes", about["nbytes"]))


def duration(seconds: float) -> str:
    """'12 s', '3.4 min', '1.2 h'."""
    if seconds < 90:
        return f"{seconds:.0f} s" if seconds >= 1 else f"{seconds:.1g} s"
    return f"{seconds / 60:.1f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
