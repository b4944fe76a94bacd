"""KL divergence over size: the files of a run, and the line of stock mixes that they are held against."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .svg import Series, lines

TITLE = "Divergence and size"


def size_plot(files: Sequence[dict[str, Any]], stock: Sequence[dict[str, Any]]) -> str:
    """The plot as SVG; '' for fewer than two points.

    files: the report of each (`report_json`); stock: what was measured of stock mixes that are not written. Files that are
    stock mixes themselves belong to the line.
    """
    known = [one for one in files if one["validation"] is not None]
    on_line = [one for one in known if one["is_stock"]] + [*stock]
    others = [one for one in known if not one["is_stock"]]
    groups = (
        ("stock mixes", on_line, 7, True),
        ("other files of this run" if on_line else "files of this run", others, 0, False),
    )
    shown = []
    for label, ones, colour, joined in groups:
        ones = sorted(ones, key=lambda one: one["bits_per_weight"])
        figures = [one["validation"] for one in ones]
        bits, divergences = [one["bits_per_weight"] for one in ones], [v["kld_mean"] for v in figures]
        errors, names = [v.get("kld_error") for v in figures], [one["label"] or "result" for one in ones]
        if ones:
            shown.append(Series(label, bits, divergences, colour=colour, error=errors, labels=names, joined=joined))
    if sum(len(one.x) for one in shown) < 2:
        return ""
    return lines(shown, "bits per weight", "KL divergence, nats per token", log=True, height=240)
