"""The table and the plot of what benchmarks/imatrix/covariance.py measured.

    python benchmarks/imatrix/covariance_report.py covariance_demo.json covariance_second.json

Writes OUT.md, with what covariance_search.py measured too (--search), and OUT.png. Needs the `plot` extra (matplotlib).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
from covariance import TYPES

from ggufmill.pipeline.reports.style import COLOURS, INK, PALE, new_axes, place_labels, save_figure, styled

RESULTS = Path(__file__).parents[1] / "results"
LABELS = {
    "none": "no calibration",
    "imatrix": "importance matrix",
    "effort1": "covariance, effort 1",
    "effort2": "covariance, effort 2",
    "effort3": "covariance, effort 3",
}
VARIANTS = {"none": PALE, "imatrix": COLOURS[0], "effort1": COLOURS[5], "effort2": COLOURS[1], "effort3": COLOURS[3]}
COLUMN = 0.05  # bits per weight between columns at least
FAMILIES = {"scalar": "o", "codebook": "s", "trellis": "^", "larger": "o"}


def family(name: str) -> str:
    return next(label for label, names in TYPES.items() if name in names.split(","))


def types_of(results: dict[str, Any], wanted: str = "") -> list[str]:
    """Types with an importance matrix's figure, of one family or of all, largest first."""
    files = results["files"]
    names = [label.split("/")[0] for label in files if label.endswith("/imatrix")]
    known = [n for n in names if any(n in each.split(",") for each in TYPES.values())]
    chosen = [n for n in known if not wanted or family(n) == wanted]
    return sorted(chosen, key=lambda n: (-files[f"{n}/imatrix"]["bits"], files[f"{n}/imatrix"]["kld"]))


def ratio(results: dict[str, Any], name: str, variant: str) -> tuple[float, float] | None:
    """(KLD / KLD with the importance matrix, its standard error as if both were of different windows: an upper limit)."""
    a, b = (results["files"].get(f"{name}/{each}") for each in (variant, "imatrix"))
    if a is None or b is None:
        return None
    value = a["kld"] / b["kld"]
    return value, value * math.hypot(a["error"] / a["kld"], b["error"] / b["kld"])


def geometric_mean(results: dict[str, Any], names: Sequence[str], variant: str) -> str:
    """'0.612 ± 0.009 (largest 0.663, 15 types)'; types share their windows, so the error is the mean of theirs."""
    ratios = [r for name in names if (r := ratio(results, name, variant)) is not None]
    if not ratios:
        return ""
    mean = math.exp(sum(math.log(value) for value, _ in ratios) / len(ratios))
    error = mean * sum(error / value for value, error in ratios) / len(ratios)
    return f"{mean:.3f} ± {error:.3f} (largest {max(value for value, _ in ratios):.3f}; {len(ratios)} types)"


def cell(results: dict[str, Any], name: str, variant: str) -> str:
    file = results["files"].get(f"{name}/{variant}")
    return "" if file is None else f"{file['kld']:.4f}"


def markdown(results: dict[str, Any]) -> list[str]:
    """The section of one model."""
    program, files = results["program"], results["files"]
    lines = [
        f"## {results['model']}",
        "",
        f"{results['layer_weights'] / 1e6:.1f} M weights in layers. {results['windows']} windows of {results['n_ctx']} tokens "
        f"of held-out text; perplexity of bf16 {results['bf16_perplexity']:.3f}. Computed on {program['cpu']}, "
        f"ggufmill {program['ggufmill']}, numba {program['numba']}.",
        "",
        "| type | bits | none | imatrix | effort 1 | effort 2 | effort 3 | 1 / imatrix | 3 / imatrix | 1, 1 window / imatrix |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in types_of(results):
        cells = [name, f"{files[f'{name}/imatrix']['bits']:.2f}"]
        cells += [cell(results, name, variant) for variant in ("none", "imatrix", "effort1", "effort2", "effort3")]
        for variant in ("effort1", "effort3", "effort1 of 1"):
            found = ratio(results, name, variant)
            cells.append("" if found is None else f"{found[0]:.3f} ± {found[1]:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Geometric means of KL divergence over that of the importance matrix:", ""]
    for label in TYPES:
        names = types_of(results, label)
        means = [
            f"{words} {mean}"
            for words, variant in (
                ("effort 1", "effort1"),
                ("effort 2", "effort2"),
                ("effort 3", "effort3"),
                ("effort 1 with the covariance of 1 window", "effort1 of 1"),
            )
            if (mean := geometric_mean(results, names, variant))
        ]
        if means:
            lines.append(f"- {label} types{' (more than 4.5 bits)' * (label == 'larger')}: {'; '.join(means)}")
    recipes = sorted({n.split("/")[0] for n in files if n.endswith("/imatrix")} - set(types_of(results)))
    if recipes:
        lines += ["", "| recipe | bits | imatrix | bits | effort 1 | ratio |", "|---|---|---|---|---|---|"]
        for name in sorted(recipes, key=lambda n: files[f"{n}/imatrix"]["bits"]):
            old, new = files[f"{name}/imatrix"], files.get(f"{name}/effort1")
            cells = [name, f"{old['bits']:.3f}", f"{old['kld']:.4f}"]
            cells += (
                ["", "", ""] if new is None else [f"{new['bits']:.3f}", f"{new['kld']:.4f}", f"{new['kld'] / old['kld']:.3f}"]
            )
            lines.append(f"| {' | '.join(cells)} |")
    for row in results.get("others", []):
        lines += ["", row]
    return [*lines, ""]


def searched(results: dict[str, Any]) -> list[str]:
    """The section of what benchmarks/imatrix/covariance_search.py measured."""
    lines = [
        f"## Types chosen by the covariance ({results['model']})",
        "",
        f"KL divergence from bf16 on {results['windows']} held-out windows of {results['n_ctx']} tokens: recipes of equal size",
        "that `search` found with errors weighted by the importance matrix and by the covariance, all encoded with the",
        f"covariance at effort {results['effort']} (`python benchmarks/imatrix/covariance_search.py`). Errors of ratios are",
        "those of paired differences.",
        "",
        "| bits | sensitivities | types by importance | types by covariance | ratio |",
        "|---|---|---|---|---|",
    ]
    for label, row in results["sizes"].items():
        old, new = row["imatrix"], row["covariance"]
        how = "none (no text)" if "without" in label else "measured on a text"
        figures = [f"{each['kld']:.4f} ± {each['error']:.4f}" for each in (old, new)]
        ratio = f"{row['ratio']:.3f} ± {row['ratio_error']:.3f}"
        lines.append(f"| {new['bits']:.2f} | {how} | {' | '.join(figures)} | {ratio} |")
    for row in results.get("others", []):
        lines += ["", row]
    return [*lines, ""]


def runtimes(results: dict[str, Any]) -> list[str]:
    """The section of perplexities that other programs compute from the same files."""
    lines = [
        f"## Files encoded with the covariance in other programs ({results['model']})",
        "",
        f"Perplexity of {results['windows']} held-out windows of {results['n_ctx']} tokens; blocks at effort 1, the rest bf16.",
        "",
        "| program | blocks | this runtime | that program | difference |",
        "|---|---|---|---|---|",
    ]
    for program in ("ik_llama.cpp", "llama.cpp"):
        for name, (ours, theirs) in results[program].items():
            lines.append(f"| {program} | {name} | {ours:.3f} | {theirs:.3f} | {theirs / ours - 1:+.2%} |")
    for row in results["notes"]:
        lines += ["", row]
    return [*lines, ""]


@styled
def draw(models: list[dict[str, Any]], path: Path) -> None:
    """KL divergence over bits per weight for each model, with standard errors; each type's name stands at its lowest point."""
    figure, panels = new_axes(1, len(models), 8.5 * len(models), 8)
    labels = []
    for axes, results in zip(panels, models, strict=True):
        files, places = results["files"], columns(results)
        for variant in ("imatrix", highest(files)):
            axes.plot(*zip(*envelope(results, variant, places), strict=True), color=VARIANTS[variant], linewidth=5, alpha=0.15)
        names, drawn = [], []
        for name, x in places.items():
            points = [(v, files[f"{name}/{v}"]) for v in LABELS if f"{name}/{v}" in files]
            klds = [one["kld"] for _, one in points]
            axes.plot([x, x], [min(klds), max(klds)], color="#d5dade", linewidth=1.5, zorder=1)
            for variant, one in points:
                mark = {"fmt": FAMILIES[family(name)], "color": VARIANTS[variant], "markersize": 4.5, "elinewidth": 0.8}
                axes.errorbar(x, one["kld"], one["error"], zorder=3, **mark)
            names.append((x, min(klds), name, INK))
            drawn.append([(x, min(klds) - points[klds.index(min(klds))][1]["error"]), (x, max(klds))])
        for variant in ("imatrix", "effort1"):
            found = sorted(
                (f["bits"], f["kld"]) for n, f in files.items() if n.startswith("search") and n.endswith(f"/{variant}")
            )
            if found:
                axes.plot(*zip(*found, strict=True), "*-", color=VARIANTS[variant], markersize=10, linewidth=1, zorder=4)
                drawn.append(found)
            mixes = [f for n, f in files.items() if n[0].isupper() and n.endswith(f"/{variant}")]
            axes.plot([f["bits"] for f in mixes], [f["kld"] for f in mixes], "D", color=VARIANTS[variant], ms=4.5, mfc="none")
            drawn += [[(f["bits"], f["kld"]), (f["bits"], f["kld"])] for f in mixes]
        axes.set(yscale="log", xlabel="bits per weight of the layers' matrices")
        axes.set_ylabel("KL divergence from bf16 on held-out text (nats per token)")
        axes.margins(y=0.08)
        weights = f"{results['layer_weights'] / 1e6:.0f} M weights in layers"
        axes.set_title(f"{results.get('title', results['model'])}: {weights}")
        axes.legend(handles=handles(files, axes), loc="upper right")
        labels.append((axes, names, drawn))
    figure.draw_without_rendering()
    for axes, names, drawn in labels:
        place_labels(axes, names, drawn)
    save_figure(figure, path)


def handles(files: dict[str, Any], axes: Any) -> list[Any]:
    """The entries of a legend: what the colours and the marks stand for."""
    variants = {LABELS[v]: ("o", VARIANTS[v]) for v in LABELS if any(n.endswith(f"/{v}") for n in files)}
    marks = {"scalar types": ("o", INK), "codebook types": ("s", INK), "trellis types": ("^", INK)}
    if any(n[0].isupper() for n in files):
        marks |= {"stock mixes": ("D", INK), "search": ("*", INK)}
    found = []
    for label, (mark, colour) in (variants | marks).items():
        face = "none" if mark == "D" else colour
        found += axes.plot([], [], mark, color=colour, mfc=face, markersize=9 if mark == "*" else 5, label=label)
    return found


def highest(files: dict[str, Any]) -> str:
    """The highest effort that was measured."""
    return max((v for v in LABELS if v.startswith("effort") and any(n.endswith(f"/{v}") for n in files)), default="imatrix")


def columns(results: dict[str, Any]) -> dict[str, float]:
    """Where each type stands: its bits per weight, moved a little where another type stands already."""
    places: dict[str, float] = {}
    for name in reversed(types_of(results)):
        x = results["files"][f"{name}/imatrix"]["bits"]
        while any(abs(x - other) < COLUMN for other in places.values()):
            x += COLUMN / 4
        places[name] = x
    return places


def envelope(results: dict[str, Any], variant: str, places: dict[str, float]) -> list[tuple[float, float]]:
    """The types that no smaller one beats, as points."""
    points, least = [], math.inf
    for name in reversed(types_of(results)):
        file = results["files"].get(f"{name}/{variant}")
        if file is not None and file["kld"] < least:
            least = file["kld"]
            points.append((places[name], least))
    return points or [(math.nan, math.nan)]


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option(
    "--search", default=RESULTS / "covariance_search.json", type=click.Path(exists=True, dir_okay=False, path_type=Path)
)
@click.option("--out", default=RESULTS / "covariance", type=click.Path(path_type=Path))
def main(files: tuple[Path, ...], search: Path, out: Path) -> None:
    models = [json.loads(path.read_text()) for path in files]
    lines = [
        "# Encoding with the covariance of the inputs",
        "",
        "KL divergence from the bf16 model in nats per token, on text that neither training nor calibration saw, with 80",
        "windows of 512 tokens of calibration (experts too) unless stated otherwise. Ordinary files, kernels with 8-bit",
        "activations. Made by `python benchmarks/imatrix/covariance.py` and `covariance_report.py`; errors of ratios are upper",
        "limits: both figures are of the same windows.",
        "",
        f"![KL divergence over bits per weight]({out.name}.png)",
        "",
    ]
    for results in models:
        lines += markdown(results)
    lines += searched(json.loads(search.read_text("utf-8")))
    lines += runtimes(json.loads((RESULTS / "covariance_runtimes.json").read_text("utf-8")))
    out.with_suffix(".md").write_text("\n".join(lines))
    draw(models, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
