"""The report of a run as one HTML page: figures, plots, tables, the recipe. Nothing outside of the page is loaded."""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from html import escape
from math import inf
from typing import Any

from ..common.figures import SAME_TOP, bits_text, per_cent_text, share_text, size_text
from .markdown import (
    COMPARISON,
    ERRORS,
    FAILED,
    ROLES,
    SEARCH,
    TYPES,
    comparison,
    coverage_line,
    error_rows,
    measured,
    recipe_shown,
    role_rows,
    search_line,
    search_rows,
    stock_rows,
    type_rows,
)
from .size_plot import TITLE, size_plot
from .svg import Series, bars, heat_map, lines

_WORD = re.compile(r"\w+|\s+|[^\w\s]")


def marked_texts(a: str, b: str) -> tuple[str, str]:
    """HTML of both texts; words and signs that the other one has not in this place are in <mark>."""
    left, right = _WORD.findall(a), _WORD.findall(b)
    out: tuple[list[str], list[str]] = [], []
    for tag, i, j, k, m in SequenceMatcher(None, left, right, autojunk=False).get_opcodes():
        for parts, words in zip(out, (left[i:j], right[k:m]), strict=True):
            text = escape("".join(words))
            parts.append(f"<mark>{text}</mark>" if text and tag != "equal" else text)
    return "".join(out[0]), "".join(out[1])


def common_words(a: str, b: str) -> tuple[int, int]:
    """How many words both texts begin with, and how many the shorter one has."""
    left, right = a.split(), b.split()
    shorter = min(len(left), len(right))
    return next((i for i in range(shorter) if left[i] != right[i]), shorter), shorter


_STYLE = """
:root{color-scheme:light dark;--paper:#fbfbfa;--card:#fff;--ink:#1d2126;--soft:#5b6470;--grid:#e3e5e8;
--c0:#3266a8;--c1:#d9822b;--c2:#3a9b6b;--c3:#c0453f;--c4:#7a5fb5;
--c5:#8a6246;--c6:#c9689f;--c7:#6f7780;--c8:#a7a12f;--c9:#2fa3b5}
@media(prefers-color-scheme:dark){:root{--paper:#15181c;--card:#1d2126;--ink:#e6e8eb;--soft:#9aa4b0;--grid:#343a42;
--c0:#6ea3e6;--c1:#f0a45d;--c2:#63c596;--c3:#ec7a74;--c4:#a993e6;
--c5:#c39a7a;--c6:#e898c6;--c7:#a2abb5;--c8:#d3cd5c;--c9:#66cfdf}}
*{box-sizing:border-box}body{margin:0 auto;padding:1.2rem 1rem 3rem;max-width:68rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,sans-serif}h1{font-size:1.6rem;margin:.2rem 0;overflow-wrap:anywhere}
h2{font-size:1.15rem;margin:2.2rem 0 .6rem}
h3{font-size:.95rem;margin:0 0 .5rem}
pre+h3,.wide+h3{margin-top:1rem}
.wide+.wide{margin-top:1rem}p,li{max-width:46rem;overflow-wrap:anywhere}.soft{color:var(--soft);font-size:.9rem}
.tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(8rem,1fr));gap:.7rem;margin:1.2rem 0}
.tile,.plot{background:var(--card);border:1px solid var(--grid);border-radius:.5rem;padding:.8rem}
.tile b{display:block;font-size:1.15rem;white-space:nowrap;font-variant-numeric:tabular-nums}
.tile span{color:var(--soft);font-size:.85rem}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:.9rem}
svg{display:block;width:100%;height:auto;max-width:36rem}svg text{font:10px system-ui,sans-serif;fill:var(--ink)}
.grid{stroke:var(--grid)}.gap{fill:var(--card);pointer-events:none}
.beside{min-width:0}.beside>:first-child{margin-top:0}
.alone{max-width:38rem;margin-bottom:1rem}
.texts{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,22rem),1fr));gap:.9rem}.texts>div{min-width:0}q{font-style:italic;overflow-wrap:anywhere}
h3.next{margin-top:1.4rem}mark{background:color-mix(in srgb,var(--c1) 30%,transparent);color:inherit;border-radius:.2rem}
.wide{overflow-x:auto}table{border-collapse:collapse;font-size:.9rem;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.25rem .9rem .25rem 0;border-bottom:1px solid var(--grid);white-space:nowrap;vertical-align:top}
td.n,th.n{text-align:right}td.w{white-space:normal}th:last-child,td:last-child{padding-right:0}
@media(max-width:32rem){th,td{padding-right:.5rem}}th{color:var(--soft);font-weight:500}
pre{background:var(--card);border:1px solid var(--grid);border-radius:.5rem;padding:.8rem;overflow-x:auto;font-size:.85rem}
pre.text{white-space:pre-wrap}.bad{color:var(--c3)}summary{cursor:pointer}
.band{fill-opacity:.18}
@media print{:root{color-scheme:light;--paper:#fff;--card:#fff;--ink:#000;--soft:#444;--grid:#ccc;
--c0:#3266a8;--c1:#d9822b;--c2:#3a9b6b;--c3:#c0453f;--c4:#7a5fb5;
--c5:#8a6246;--c6:#c9689f;--c7:#6f7780;--c8:#a7a12f;--c9:#2fa3b5}
body{max-width:none;padding:0;font-size:11pt}.plot,.tile,tr,.texts>div{break-inside:avoid}h2,h3{break-after:avoid}
pre,.wide{white-space:pre-wrap;overflow:visible}
*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""
_COLOURS = "".join(
    f".f{i}{{fill:var(--c{i})}}.s{i}{{stroke:var(--c{i});fill:none;stroke-width:1.6}}" for i in range(10)
)  # fills and strokes


def page_text(data: dict[str, Any]) -> str:
    """The page of a run's report (`report_json`)."""
    name = data["name"]
    body = [
        f"<h1>{escape(name)}</h1>",
        *failures_shown(data),
        f'<p class="soft">{escape(data["source"])}, by the recipe {escape(data["recipe"])}. '
        f"Made {escape(data['made'])} by ggufmill {escape(data['version'])} on "
        f"{escape(data['machine'])}.</p>",
        *sections(data),
    ]
    return page(name, body)


def sections(data: dict[str, Any]) -> list[str]:
    """What the page shows of a file."""
    return [
        _tiles(data),
        *_warnings(data),
        _section(
            "Size", [_sizes(data), _bits(data), ("Shares", table(ROLES, role_rows(data)) + table(TYPES, type_rows(data)))]
        ),
        *_search(data),
        *_validation(data),
        *_errors(data),
        *_imatrix(data),
        _section("Time", [_time(data)]),
        _section("Recipe", [], f"<pre>{escape(recipe_shown(data))}</pre>{_reproduce(data)}"),
        _tensors(data),
    ]


def page(name: str, body: Sequence[str]) -> str:
    """A page of these elements, titled by the model's name."""
    head = '<meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
    head += f"<title>{escape(name)}</title><style>{_STYLE}{_COLOURS}</style>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{"".join(body)}</body></html>\n'


def _tiles(data: dict[str, Any]) -> str:
    v = data["validation"]
    tiles = [
        (size_text(data["file_bytes"]), "on disk"),
        (bits_text(data["bits_per_weight"]), "bits per weight"),
        (_count(data["weights"]), "weights"),
    ]
    if v is not None:
        base = f"{v['baseline']}: {v['baseline_perplexity']:.4f}"
        tiles += [
            (f"{v['perplexity']:.4f}", _plus_minus(v, "error", ".4f", f"perplexity, {base}")),
            (f"{100 * (v['ratio'] - 1):+.2f} %", _plus_minus(v, "ratio_error", ".2%", f"perplexity against {v['baseline']}")),
            (f"{v['kld_mean']:.5f}", _plus_minus(v, "kld_error", ".5f", "KL divergence, nats")),
            (per_cent_text(v["top1_agreement"]), _plus_minus(v, "top1_error", ".2f", SAME_TOP)),
        ]
    if v is not None and v.get("tokens_per_second"):
        tiles.append((_count(round(v["tokens_per_second"])), f"tokens/s, prompts of {v['n_ctx']} with scoring, this machine"))
    inner = "".join(f'<div class="tile"><b>{escape(value)}</b><span>{escape(label)}</span></div>' for value, label in tiles)
    return f'<div class="tiles">{inner}</div>'


def _plus_minus(figures: dict[str, Any], error: str, form: str, label: str) -> str:
    """The label, and before it the figure's standard error; a single prediction has none."""
    value = figures.get(error)
    return label if value is None else f"± {value:{form}}; {label}"


def _count(n: int) -> str:
    for unit, size in (("T", 10**12), ("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if n >= size:
            return f"{n / size:.3g} {unit}"
    return str(n)


def failures_shown(data: dict[str, Any]) -> list[str]:
    """The limits that a result exceeds, as a list in red."""
    lines = "".join(f"<li>{escape(failure)}</li>" for failure in data["failures"])
    return [f'<p class="bad"><b>{FAILED}</b></p><ul class="bad">{lines}</ul>'] if lines else []


def _warnings(data: dict[str, Any]) -> list[str]:
    notes = [*data["warnings"], *(data["validation"] or {}).get("notes", [])]
    return [f"<h2>Warnings</h2><ul>{''.join(f'<li>{escape(w)}</li>' for w in notes)}</ul>"] if notes else []


def _sizes(data: dict[str, Any]) -> tuple[str, str]:
    keys = list(data["types"])
    rows = []
    for role, types in data["roles"].items():
        nbytes = sum(types.values())
        label = f"{role}: {size_text(nbytes)}, {share_text(nbytes / data['total_bytes'])}"
        rows.append((label, [(name, types[name] / 2**20) for name in keys if name in types]))
    return "Size by role and type", bars(rows, keys, " MiB")


def _bits(data: dict[str, Any]) -> tuple[str, str]:
    return "Bits per weight", heat_map(_by_layer(data, "bits", "{:.4g} bits per weight"), "layer; bits per weight")


def _by_layer(data: dict[str, Any], figure: str, text: str) -> dict[tuple[str, int], tuple[float, str]]:
    """The cells of a heat map of layers and matrices. figure: a key of the report's table; text: how it is said on touch."""
    matrices = [t for t in data["table"] if t["layer"] is not None and len(t["shape"]) > 1 and 0 < (t[figure] or 0) < inf]
    return {(t["kind"], t["layer"]): (t[figure], f"{t['name']}: {t['type']}, {text.format(t[figure])}") for t in matrices}


def _search(data: dict[str, Any]) -> list[str]:
    if data["search"] is None:
        return []
    rules = f"<pre>{escape(data['search']['recipe'].rstrip())}</pre>"
    rest = f"<p>{escape(search_line(data))}</p>{table(SEARCH, search_rows(data))}"
    return [_section("Search", [], f"{rest}<details><summary>The recipe that was found</summary>{rules}</details>")]


def _validation(data: dict[str, Any]) -> list[str]:
    v = data["validation"]
    if v is None:
        return []
    running = v.get("running", {})
    windows = [i + 1 for i in range(len(running.get("perplexity", [])))]
    plots = [] if data["label"] else [(TITLE, size_plot([data], data["stock"]))]  # of several files all are in one
    if len(windows) > 1:
        both = [Series("result", windows, running["perplexity"], error=running.get("error"))]
        both.append(Series(v["baseline"], windows, running["baseline_perplexity"], dashed=True))
        plots.append(("Perplexity so far", lines(both, "windows read", "perplexity")))
        ratios = [a / b for a, b in zip(running["perplexity"], running["baseline_perplexity"], strict=True)]
        shown = [Series(f"result / {v['baseline']}", windows, ratios, colour=2, error=running.get("ratio_error"))]
        limit = data["limits"].get("max_ppl_ratio")
        if limit:
            shown.append(Series("allowed by the recipe", windows, [limit] * len(windows), dashed=True, colour=7))
        plots.append(("Ratio of the perplexities so far", lines(shown, "windows read", "ratio")))
        shown = [Series("mean KL divergence", windows, running["kld_mean"], colour=3, error=running.get("kld_error"))]
        limit = data["limits"].get("max_kld")
        if limit:
            shown.append(Series("allowed by the recipe", windows, [limit] * len(windows), dashed=True, colour=7))
        plots.append(("KL divergence so far", lines(shown, "windows read", "nats per token", from_zero=True)))
    if v.get("kld_percentiles"):
        percent = [float(p) for p in v["kld_percentiles"]]
        spread = Series("KL divergence that this share stays below", percent, list(v["kld_percentiles"].values()), colour=4)
        drawn = lines([spread], "share of the predictions, in per cent", "KL divergence in nats", log=True)
        plots.append(("KL divergence of single predictions", drawn))
    tables = f"<p>{escape(measured(v))}</p>{table(COMPARISON, [*comparison(data), *stock_rows(data)])}"
    return [_section("Quality", plots, tables + _texts(v.get("texts", []), v["baseline"]))]


def _texts(texts: Sequence[dict[str, str]], baseline: str) -> str:
    """What the baseline and the result wrote after each prompt, side by side, differences marked."""
    if not texts:
        return ""
    note = "Each the most probable token; what comes after a difference has another context."
    parts = [f'<h3 class="next">Text from both</h3><p class="soft">{note}</p>']
    for one in texts:
        a, b = one["baseline"], one["result"]
        same, words = common_words(a, b)
        how = "the texts are the same" if a == b else f"the first {same} of {words} words are the same"
        shown = zip((baseline, "result"), marked_texts(a, b), strict=True)
        columns = "".join(f'<div><h3>{escape(name)}</h3><pre class="text">{html}</pre></div>' for name, html in shown)
        parts.append(f"<p>After <q>{escape(one['prompt'])}</q>: {how}.</p>")
        parts.append(f'<div class="texts">{columns}</div>')
    return "".join(parts)


def _errors(data: dict[str, Any]) -> list[str]:
    plots, layers = [], (data["validation"] or {}).get("layers")
    if layers:
        numbers = [e["layer"] for e in layers]
        shown = [
            Series("all tokens", numbers, [e["relative"] for e in layers]),
            Series("worst token", numbers, [e["worst"] for e in layers], colour=3),
        ]
        plots.append(("Outputs of the layers", lines(shown, "layer", "relative error", log=True)))
    plots.append(("Weights", heat_map(_by_layer(data, "error", "error {:.5f}"), "layer; relative error of the weights")))
    if not any(drawn for _, drawn in plots) and not error_rows(data):
        return []
    legend = (
        '<p class="soft">Relative error |b - a| / |a|: of the layers on the first window, of weights on samples read back.</p>'
    )
    return [_section("Error by layer", plots, legend + table(ERRORS, error_rows(data)))]


def _imatrix(data: dict[str, Any]) -> list[str]:
    cover = data["coverage"]
    if cover is None:
        return []
    rows = [row for row in cover["layers"] if row["tokens"] is not None]
    plots = []
    if rows:
        numbers = [row["layer"] for row in rows]
        shown = [
            Series(label, numbers, [row["tokens"][i] for row in rows], colour=colour)
            for i, label, colour in ((2, "most", 2), (1, "median", 0), (0, "fewest", 3))
        ]
        plots.append(("Tokens that the experts saw", lines(shown, "layer", "tokens", log=True)))
    remarks = "".join(f"<li>{escape(r)}</li>" for r in cover["remarks"])
    return [
        _section(
            "Imatrix coverage", plots, f"<p>{escape(coverage_line(data))}</p>" + (f"<ul>{remarks}</ul>" if remarks else "")
        )
    ]


def _time(data: dict[str, Any]) -> tuple[str, str]:
    seconds = data["seconds"]
    rows = [(f"{stage}: {t:.1f} s", [("seconds", t)]) for stage, t in seconds.items()]
    return "Seconds by stage", bars(rows, ["seconds"], " s")


def _reproduce(data: dict[str, Any]) -> str:
    return (
        f"<p>Made again, byte for byte, with ggufmill {escape(data['version'])} and the same source:</p>"
        f"<pre>ggufmill run {escape(data['recipe'])}</pre>"
    )


def _tensors(data: dict[str, Any]) -> str:
    rows = [
        (t["name"], " x ".join(map(str, t["shape"])), t["type"], f"{t['nbytes']:,}", _error(t["error"]), t["rule"])
        for t in data["table"]
    ]
    inner = table(("tensor", "shape", "type", "bytes", "error", "rule"), rows)
    return f"<h2>Tensors</h2><details><summary>All {len(rows)} tensors</summary>{inner}</details>"


def _error(error: float | None) -> str:
    return "" if error is None else f"{error:.5f}"


def _section(title: str, plots: Sequence[tuple[str, str]], rest: str = "") -> str:
    drawn = [f'<div class="plot"><h3>{escape(name)}</h3>{svg}</div>' for name, svg in plots if svg]
    if len(drawn) == 1:  # the text takes the place beside it
        return f'<section><h2>{escape(title)}</h2><div class="plots">{drawn[0]}<div class="beside">{rest}</div></div></section>'
    return f'<section><h2>{escape(title)}</h2><div class="plots">{"".join(drawn)}</div>{rest}</section>'


def table(headings: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A table with numbers to the right and lists wrapped; one that is too wide for the page scrolls."""
    right = [bool(rows) and all(str(row[i])[:1] in "0123456789+-" for row in rows if str(row[i])) for i in range(len(headings))]

    def cells(tag: str, values: Sequence[object]) -> str:
        marks = (' class="n"' if r else ' class="w"' if ", " in str(v) else "" for r, v in zip(right, values, strict=True))
        return "".join(f"<{tag}{mark}>{escape(str(v))}</{tag}>" for v, mark in zip(values, marks, strict=True))

    body = "".join(f"<tr>{cells('td', row)}</tr>" for row in rows)
    return f'<div class="wide"><table><tr>{cells("th", headings)}</tr>{body}</table></div>'
