"""The table and the picture of what benchmarks/imatrix/curvature.py measured.

    python benchmarks/imatrix/curvature_report.py curvature_demo.json curvature_second.json

Writes OUT.md and OUT.png. Needs the `plot` extra (matplotlib).
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
from covariance_report import RESULTS, family

from ggufmill.pipeline.reports.style import COLOURS, INK, new_axes, save_figure, styled

FAMILIES = ("scalar", "codebook", "trellis")
SHOWN = {"covariance 1": COLOURS[5], "curvature 1": COLOURS[1], "curvature 2": COLOURS[3]}
SHOWN |= {"curvature 2 sequential": COLOURS[2], "curvature 2 sequential tuned": COLOURS[4]}
METHODS = tuple(f"{data} {effort}" for data in ("covariance", "curvature") for effort in range(4))
METHODS += ("curvature 1 sequential", "curvature 2 sequential", "curvature 2 sequential tuned")
RIVALS = {"GPTQ": COLOURS[0], "AutoRound": INK}  # curvature_rivals.py


def ratio(files: dict[str, Any], label: str) -> tuple[float, float] | None:
    """(KLD / KLD with the importance matrix of the same held-out windows, its standard error as if they were others: an upper
    limit)."""
    name = label.partition("/")[0]
    a, b = files.get(label), files.get(f"{name}/imatrix")
    if a is None or b is None or a["windows"] != b["windows"]:
        return None
    value = a["kld"] / b["kld"]
    return value, value * math.hypot(a["error"] / a["kld"], b["error"] / b["kld"])


def types_of(files: dict[str, Any]) -> list[str]:
    """Types, by family and then by bits."""
    names = [label.partition("/")[0] for label in files if label.endswith("/imatrix")]
    names = [name for name in names if family(name) in FAMILIES]
    return sorted(names, key=lambda name: (FAMILIES.index(family(name)), -files[f"{name}/imatrix"]["bits"], name))


def frontier(files: dict[str, Any]) -> list[tuple[float, float]]:
    """(bits, logarithm of the KLD) of the types with an importance matrix that no smaller type beats, by bits."""
    best: list[tuple[float, float]] = []
    sizes = sorted((one["bits"], one["kld"]) for label, one in files.items() if label.endswith("/imatrix"))
    for bits, kld in sizes:
        if not best or math.log(kld) < best[-1][1]:
            best.append((bits, math.log(kld)))
    return best


def equal_bits(files: dict[str, Any], label: str) -> float | None:
    """The bits per weight at which an importance matrix has the KLD of a file, interpolated between the best types in
    logarithms; None where no type is as good."""
    value, found = math.log(files[label]["kld"]), None
    for (bits, high), (more, low) in pairwise(frontier(files)):
        if low <= value <= high:
            found = bits + (more - bits) * (high - value) / (high - low)
    return found


def finest_beaten(files: dict[str, Any], label: str) -> str | None:
    """'q4_K (4.53)': the type of most bits that loses no less with an importance matrix; None if none with more bits does."""
    value, bits = files[label]["kld"], files[label]["bits"]
    found = [(one["bits"], name) for name, one in _with_imatrix(files) if one["kld"] >= value and one["bits"] > bits]
    return "{1} ({0:.2f})".format(*max(found)) if found else None


def _with_imatrix(files: dict[str, Any]) -> list[tuple[str, Any]]:
    return [(label.partition("/")[0], one) for label, one in files.items() if label.endswith("/imatrix")]


def steps(files: dict[str, Any], methods: Sequence[str]) -> list[str]:
    """A table: the finest type with an importance matrix that each type's curvature does no worse than."""
    methods = [method for method in methods if method in SHOWN and method.startswith("curvature")]
    lines = [
        "",
        f"| is at least as good as, with an importance matrix | {' | '.join(methods)} |",
        "|---|" + "---|" * len(methods),
    ]
    for name in sorted(types_of(files), key=lambda name: -files[f"{name}/imatrix"]["bits"]):
        labels = [f"{name}/{method}" for method in methods]
        cells = [(label in files and finest_beaten(files, label)) or "" for label in labels]
        lines += [f"| {name} ({files[f'{name}/imatrix']['bits']:.2f}) | {' | '.join(cells)} |"] if any(cells) else []
    return lines if len(lines) > 3 else []


def saved_bits(files: dict[str, Any], methods: Sequence[str]) -> list[str]:
    """A table: what an importance matrix would need for the KLD of each type with second moments; and the means."""
    methods = [method for method in methods if method in SHOWN]
    lines = ["", f"| bits that an importance matrix needs for the same | bits | {' | '.join(methods)} |"]
    lines.append("|---|--:|" + "--:|" * len(methods))
    saved: dict[str, list[float]] = {method: [] for method in methods}
    for name in sorted(types_of(files), key=lambda name: -files[f"{name}/imatrix"]["bits"]):
        bits, cells = files[f"{name}/imatrix"]["bits"], []
        for method in methods:
            label = f"{name}/{method}"
            equal = equal_bits(files, label) if label in files else None
            cells.append("" if equal is None else f"{equal:.2f}")
            saved[method] += [] if equal is None else [equal - bits]
        lines += [f"| {name} | {bits:.2f} | {' | '.join(cells)} |"] if any(cells) else []
    means = [
        f"{method} {sum(each) / len(each):.2f} ({min(each):.2f} to {max(each):.2f}; {len(each)} types)"
        for method, each in saved.items()
        if each
    ]
    if not means:
        return []
    return [*lines, "", f"Bits per weight saved at equal KL divergence, means: {'; '.join(means)}."]


def mean_ratio(files: dict[str, Any], names: Sequence[str], method: str) -> str:
    """'0.468 (largest 0.515; 15 types)', a geometric mean; '' where nothing was measured."""
    ratios = [found[0] for name in names if (found := ratio(files, f"{name}/{method}")) is not None]
    if not ratios:
        return ""
    mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
    return f"{mean:.3f} (largest {max(ratios):.3f}; {len(ratios)} types)"


def markdown(results: dict[str, Any]) -> list[str]:
    """The section of one model."""
    files, program = results["files"], results["program"]
    methods = [method for method in (*METHODS, *RIVALS) if any(label.endswith(f"/{method}") for label in files)]
    lines = [
        f"## {results['model']}",
        "",
        f"{results['windows']} windows of {results['n_ctx']} tokens of held-out text; perplexity of bf16 "
        f"{results['bf16_perplexity']:.3f}. Computed on {program['cpu']}, numba {program['numba']}.",
        "",
        f"| type | bits | imatrix | {' | '.join(methods)} |",
        "|---|--:|--:|" + "--:|" * len(methods),
    ]
    for name in types_of(files):
        base = files[f"{name}/imatrix"]
        cells = [name, f"{base['bits']:.2f}", f"{base['kld']:.5f}"]
        for method in methods:
            found = ratio(files, f"{name}/{method}")
            cells.append("" if found is None else f"{found[0]:.3f} ± {found[1]:.3f}")
        lines.append(f"| {' | '.join(cells)} |")
    lines += ["", "Geometric means over the importance matrix's KL divergence:", ""]
    for kind in FAMILIES:
        names = [name for name in types_of(files) if family(name) == kind]
        means = [f"{method} {mean}" for method in methods if (mean := mean_ratio(files, names, method))]
        lines += [f"- {kind} types: {'; '.join(means)}"] if means else []
    lines += saved_bits(files, methods) + steps(files, methods)
    studied = [label for label in files if "(" in label]
    if studied:
        lines += ["", "| calibrated otherwise | over the importance matrix of 80 windows |", "|---|--:|"]
        for label in studied:
            found = ratio(files, label)
            lines += [f"| {label} | {found[0]:.3f} ± {found[1]:.3f} |"] if found is not None else []
    return [*lines, ""]


@styled
def draw(models: list[dict[str, Any]], path: Path) -> None:
    """For each model the ratios of every type, one colour for each method."""
    figure, axes = new_axes(len(models), 1, 9, 3.6 * len(models))
    for axis, results in zip(axes, models, strict=True):
        files, names = results["files"], types_of(results["files"])
        drawn = [(m, c) for m, c in (SHOWN | RIVALS).items() if any(label.endswith(f"/{m}") for label in files)]
        for place, (method, colour) in enumerate(drawn):
            aside = 0.11 * (place - (len(drawn) - 1) / 2)
            points = [
                (i + aside, *found) for i, name in enumerate(names) if (found := ratio(files, f"{name}/{method}")) is not None
            ]
            if points:
                x, values, errors = zip(*points, strict=True)
                axis.errorbar(x, values, errors, fmt="o", color=colour, markersize=5, elinewidth=0.8, label=method)
        axis.axhline(1, color="#888888", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, rotation=60, ha="right")
        axis.set(ylim=(0, 1.2), ylabel="KL divergence / importance matrix's", title=results.get("title", results["model"]))
        axis.legend(loc="upper right", ncols=3)
    save_figure(figure, path)


@click.command(help=__doc__)
@click.argument("files", nargs=-1, required=True, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--out", default=RESULTS / "curvature", type=click.Path(path_type=Path))
def main(files: tuple[Path, ...], out: Path) -> None:
    models = [json.loads(path.read_text("utf-8")) for path in files]
    lines = [
        "# Encoding with the curvature of both sides",
        "",
        "KL divergence from the bf16 model on text that neither training nor calibration saw, over that of the same type with",
        "an importance matrix, with 80 windows of 512 tokens of calibration unless stated otherwise. Ordinary files of equal",
        "size, read with 8-bit activations; embeddings and output matrix stay bf16. The number behind a method is its effort.",
        "Made by `python benchmarks/imatrix/curvature.py` and `curvature_report.py`; errors are upper limits, both figures",
        "being of the same windows.",
        "",
        f"![KL divergence over the importance matrix's]({out.name}.png)",
        "",
    ]
    for results in models:
        lines += markdown(results)
    models = [each for each in models if any(label.endswith(f"/{method}") for label in each["files"] for method in SHOWN)]
    out.with_suffix(".md").write_text("\n".join(lines), "utf-8")
    draw(models, out.with_suffix(".png"))


if __name__ == "__main__":
    main()
