"""Searched recipes for a size against every stock mix, on the demo model: KL divergence from the unquantised model.

\\b
    python benchmarks/mixes/target_size.py --json benchmarks/results/target_size.json --plot benchmarks/results/target_size.png

Imatrix and sensitivities come from recipes/demo/calibration.txt; divergences are measured on recipes/demo/heldout.txt, of which
the search reads nothing. Stock mixes have the same imatrix. For some stock mixes the search is given the size of that mix's
tensors, and its recipe is compared with the best stock mix of at most that size. About three minutes on one idle core.
"""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import click

from ggufmill.cli.display.console import table
from ggufmill.convert import open_source
from ggufmill.formats import PlanError, TensorSource
from ggufmill.imatrix.collect import collect
from ggufmill.jobs.plan import Plan
from ggufmill.pipeline.planning import Quantization
from ggufmill.pipeline.recipe_search.options import SearchOptions, SearchTarget, parse_types
from ggufmill.pipeline.recipe_search.search_job import SearchJob
from ggufmill.pipeline.reports.style import COLOURS, INK, PALE, new_axes, place_labels, save_figure, styled
from ggufmill.pipeline.requests.quantize import QuantizeRequest
from ggufmill.quantize import can_encode
from ggufmill.quantize.gguf_source import simulate_quantization
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.mixes import default_type, file_types
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.sensitivity import Reference

TARGET_BITS = (2.7, 3.5, 4.5, 5.4)  # per weight: the stock mixes nearest to these give the target sizes


def demo(chunks: int) -> tuple[TensorSource, Importance]:
    source = open_source(FOLDER / "demo")
    model = load_model(source)
    tokens = model.tokenizer.encode((FOLDER / "demo/calibration.txt").read_text("utf-8"))
    return source, Importance(collect(model, tokens, chunks=chunks)[0].fit(source, "demo").means())


def stock(source: TensorSource, importance: Importance, reference: Reference) -> list[dict[str, Any]]:
    """Size and divergence of every file type that is smaller than bf16."""
    mixes = []
    for name in file_types():
        if not can_encode(default_type(name)) or default_type(name).is_float or "_BN" in name:  # ternary: for other models
            continue
        try:
            plan = plan_quantize(source, "out.gguf", type=name, importance=importance, ignore_imatrix_rules=True)
        except PlanError as error:
            click.echo(f"{name}: {error}", err=True)
            continue
        if plan.bits_per_weight > 9:  # bf16, interleaved
            continue
        mixes.append({"name": name, **measured(source, plan, reference)})
        click.echo(f"{name:12} {mixes[-1]['bits']:.3f} bits  KLD {mixes[-1]['kld']:.5f}", err=True)
    return mixes


def measured(source: TensorSource, plan: Plan, reference: Reference) -> dict[str, float]:
    divergence = reference.divergence(simulate_quantization(source, plan))
    return {"nbytes": plan.total_bytes, "bits": plan.bits_per_weight, "kld": divergence.mean, "error": divergence.error}


@click.command(help=__doc__)
@click.option("--json", "out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--plot", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--chunks", default=12, show_default=True, help="Windows of the held-out text.")
def main(out: Path | None, plot: Path | None, chunks: int) -> None:
    began = time.process_time()
    source, importance = demo(40)
    reference = Reference(source, (FOLDER / "demo/heldout.txt").read_text("utf-8"), 512, chunks, threads=1)
    mixes = stock(source, importance, reference)
    weights = sum(t.n_elements for t in source.tensors.values())
    jobs = {
        "with text": SearchOptions(parse_types(None), text=FOLDER / "demo/calibration.txt", threads=1),
        "without text": SearchOptions(parse_types(None)),
    }
    request = QuantizeRequest(source.path, "out.gguf", ignore_imatrix_rules=True, allow_requantize=True)
    quantization = Quantization(request, source=source)
    quantization.importance = importance
    searches = {label: SearchJob(quantization, options) for label, options in jobs.items()}
    points, rows = [], []
    for target_bits in TARGET_BITS:
        aim = min(mixes, key=lambda m: abs(m["bits"] - target_bits))
        best = min((m for m in mixes if m["nbytes"] <= aim["nbytes"]), key=lambda m: m["kld"])
        for label, job in searches.items():
            result = job.find(SearchTarget(bits=8 * aim["nbytes"] / weights))
            point = {"name": label, "aim": aim["name"], **measured(source, job.plan(result.text), reference)}
            point |= {"best": best["name"], "best_kld": best["kld"], "ratio": point["kld"] / best["kld"]}
            point |= {"used": point["nbytes"] / aim["nbytes"], "predicted": result.assignment.predicted, "recipe": result.text}
            points.append(point)
            rows.append(
                (
                    aim["name"],
                    f"{aim['bits']:.3f}",
                    label,
                    f"{point['used']:.2%}",
                    f"{point['kld']:.5f} ± {point['error']:.5f}",
                    best["name"],
                    f"{best['kld']:.5f} ± {best['error']:.5f}",
                    f"{point['ratio']:.3f}",
                )
            )
    seconds = time.process_time() - began
    columns = ("size of", "bits", "recipe", "used", "KLD", "best stock", "its KLD", "ratio")
    click.echo(table(columns, rows) + f"\n\n{seconds:.0f} seconds of processor time")
    if out is not None:
        out.write_text(json.dumps({"stock": mixes, "searched": points, "seconds": seconds}, indent=1) + "\n")
    if plot is not None:
        draw(mixes, points, plot)


@styled
def draw(mixes: list[dict[str, Any]], points: list[dict[str, Any]], path: Path) -> None:
    """KL divergence over bits per weight, with standard errors: stock mixes (interleaved ones have no label, their plain twins
    do) and searched recipes."""
    figure, (axes,) = new_axes(1, 1, 12, 8)
    plain = [m for m in mixes if not m["name"].endswith(("_R4", "_R8"))]
    interleaved = [m for m in mixes if m["name"].endswith(("_R4", "_R8"))]
    kinds = (
        ("stock mixes", "o", COLOURS[0], plain),
        ("stock mixes, interleaved", "x", PALE, interleaved),
        ("searched (sensitivity measured)", "*-", COLOURS[1], [p for p in points if p["name"] == "with text"]),
        ("searched (errors of weights alone)", "*-", COLOURS[5], [p for p in points if p["name"] == "without text"]),
    )
    for label, form, colour, chosen in kinds:
        bits, divergences, errors = ([one[key] for one in chosen] for key in ("bits", "kld", "error"))
        size = 9 if "*" in form else 4
        form_of = {"fmt": form, "color": colour, "markersize": size, "linewidth": 1, "elinewidth": 0.8}
        axes.errorbar(bits, divergences, errors, label=label, **form_of)
    axes.set(yscale="log", xlabel="bits per weight", ylabel="KL divergence from the unquantised model, held-out text (nats)")
    axes.set_title("Demo model: searched recipes for a size, and every stock mix")
    axes.legend()
    figure.draw_without_rendering()
    lines = [[(p["bits"], p["kld"]) for p in chosen] for _, _, _, chosen in kinds[2:]]
    bars = [*mixes, *points]  # a mark with its error bar: a label lies on neither
    lines += [[(m["bits"], m["kld"] - m["error"]), (m["bits"], m["kld"] + m["error"])] for m in bars]
    place_labels(axes, [(m["bits"], m["kld"], m["name"], INK) for m in plain], lines)
    save_figure(figure, path)


if __name__ == "__main__":
    main()
