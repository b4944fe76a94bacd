"""What an importance matrix is worth: every type of 4 bits and fewer on the demo model, with it and without.

\\b
    python benchmarks/imatrix/imatrix_quality.py
    python benchmarks/imatrix/imatrix_quality.py --types iq2_k,q4_K --chunks 8 --out out/imatrix_quality
    python benchmarks/imatrix/imatrix_quality.py --types iq1_s_r4,iq1_m_r4 --add
    python benchmarks/imatrix/imatrix_quality.py --texts recipes/demo/calibration.txt,bundled,prose --types q4_K,iq3_k,iq2_k

All weights of the layers become the type; embeddings and output matrix stay as they are. The imatrix is computed on the demo's
calibration text, perplexity and KL divergence from the bf16 model on its held-out text. Both are those of the stored weights:
products are made in float32. A type that cannot be made without importance has no figures without; rows of 64 columns that a
type cannot hold become what llama-quantize falls back to.

With --texts it is what each of several calibration texts is worth, of as many windows each: files, `bundled`, or one of the
kinds of text in that (prose, languages, code ...); written to OUT_texts.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import numpy as np

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, PlanError, TensorSource
from ggufmill.imatrix.collect import collect
from ggufmill.imatrix.texts import calibration_tokens
from ggufmill.quantize import can_encode, decode
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.rules import parse_rules
from ggufmill.recipes import FOLDER, bundled_text, find_text
from ggufmill.runtime import Model, load_model
from ggufmill.runtime.evaluate.perplexity import Perplexity, perplexity

RESULTS = Path(__file__).parents[1] / "results"
N_CTX = 512
TRAINED = ("iq1_bn", "iq2_bn", "q1_0_g128")  # for models that were trained with weights of such few values


def small_types() -> list[str]:
    """Types of less than five bits per weight that are encodings of their own, largest first."""
    own = [t for t in TYPES.values() if t.base is None and not t.is_float and can_encode(t)]
    return in_order([t.name for t in own if bits(t.name) < 5 and t.name not in TRAINED])


def in_order(names: Iterable[str]) -> list[str]:
    return sorted(names, key=lambda name: (-bits(name), name))


def bits(name: str) -> float:
    return 8 * TYPES[name].block_bytes / TYPES[name].block


def quantised(source: TensorSource, name: str, importance: Importance | None) -> TensorSource:
    """The source with the weights of its layers replaced by what the type makes of them."""
    rules = parse_rules(rf"^blk\.={name}", "benchmark")
    plan = plan_quantize(source, "none.gguf", rules=rules, importance=importance, ignore_imatrix_rules=True)
    tensors = {}
    for output in plan.outputs:
        tensor = source.tensors[output.name]
        if output.type.is_float:
            tensors[output.name] = tensor
            continue
        per_matrix = tensor.shape[1]
        runs = [output.produce(at, at + per_matrix) for at in range(0, tensor.n_rows, per_matrix)]
        rows = [decode(run, output.type.name, tensor.shape[0]) for run in runs]

        def read(start: int, stop: int, rows: list = rows, per_matrix: int = per_matrix) -> Any:
            matrix, first = divmod(start, per_matrix)
            return rows[matrix][first : first + stop - start]

        nothing = dict.fromkeys(("raw", "stored", "mapped", "read_bf16"))
        tensors[output.name] = dataclasses.replace(tensor, source_type="f32", read=read, **nothing)
    return dataclasses.replace(source, tensors=tensors)


def cache_hidden_states(model: Model) -> None:
    """Caches the model's hidden states by tokens: the baseline computes the same windows for every type."""
    cached, compute = {}, model.hidden

    def hidden(batch: Any, *more: Any, **options: Any) -> Any:
        key = b"".join(np.asarray(tokens, np.int64).tobytes() for _, tokens in batch)
        if key not in cached:
            cached[key] = compute(batch, *more, **options)
        return cached[key]

    model.hidden = hidden


def figures(result: Perplexity) -> dict[str, float | None]:
    return {
        "perplexity": result.perplexity,
        "kld": result.kld_mean,
        "kld_error": result.kld_error,
        "top1_agreement": result.top1_agreement,
    }


def markdown(results: dict[str, Any]) -> str:
    """The table, best type first."""
    lines = [
        "# What an imatrix is worth",
        "",
        f"Demo model (8.4 M weights), {results['calibration_chunks']} windows of calibration, {results['chunks']} windows of "
        f"{N_CTX} tokens of held-out text scored; perplexity of bf16 {results['bf16_perplexity']:.3f}. "
        "KL divergence from bf16 in nats; made by `python benchmarks/imatrix/imatrix_quality.py`.",
        "",
        "| type | bits | perplexity, none | with | KLD, none | with | with / none | same top token, none | with |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for name, row in results["types"].items():
        none, im = row["none"], row["imatrix"]
        cells = [name, f"{row['bits']:.2f}"]
        if none is None:
            cells += ["", f"{im['perplexity']:.3f}", "", f"{im['kld']:.4f}", "", "", f"{im['top1_agreement']:.1f} %"]
        else:
            cells += [f"{each['perplexity']:.3f}" for each in (none, im)] + [f"{each['kld']:.4f}" for each in (none, im)]
            cells += [f"{im['kld'] / none['kld']:.3f}", f"{none['top1_agreement']:.1f} %", f"{im['top1_agreement']:.1f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    both = [row for row in results["types"].values() if row["none"] is not None]
    if both:
        ratios = [row["imatrix"]["kld"] / row["none"]["kld"] for row in both]
        kld = sum(ratio < 1 for ratio in ratios)
        ppl = sum(row["imatrix"]["perplexity"] < row["none"]["perplexity"] for row in both)
        either = sum(
            r < 1 or row["imatrix"]["perplexity"] < row["none"]["perplexity"] for r, row in zip(ratios, both, strict=True)
        )
        mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
        lines += [
            "",
            f"An imatrix lowers the KLD of {kld} of {len(both)} types, the perplexity of {ppl}, one of the two of {either}; "
            f"KLD with / none is {mean:.3f} (geometric mean).",
        ]
    return "\n".join(lines) + "\n"


def tokens_of(text: str, model: Model) -> list[int]:
    """Tokens of a file, of the bundled text, or of one kind of it."""
    path = find_text(text)
    if not path.exists():
        rows = [json.loads(line) for line in bundled_text().read_text("utf-8").splitlines()]
        return [id for row in rows if row["kind"] == text for id in model.tokenizer.encode(row["text"])]
    return calibration_tokens(path, model.tokenizer, model.metadata)


def compare_texts(texts: list[str], types: list[str], chunks: int, calibration_chunks: int, threads: int, out: Path) -> None:
    """KL divergence of each type by the importance matrix of each text."""
    source = open_source(FOLDER / "demo")
    options = {"threads": threads, "exact": True}
    base = load_model(source, **options)
    heldout = base.tokenizer.encode((FOLDER / "demo/heldout.txt").read_text("utf-8"))
    found = {"none": None}
    for text in texts:
        imatrix, _ = collect(base, tokens_of(text, base), n_ctx=N_CTX, chunks=calibration_chunks)
        found[f"{text.removeprefix('recipes/')}, {imatrix.chunk_count} windows"] = Importance(imatrix.means())
    cache_hidden_states(base)
    results: dict[str, dict[str, Any]] = {}
    for name in types:
        for text, importance in found.items():
            try:
                model = load_model(quantised(source, name, importance), **options)
            except PlanError:  # not without importance
                continue
            results.setdefault(text, {})[name] = figures(perplexity(model, heldout, n_ctx=N_CTX, chunks=chunks, baseline=base))
            click.echo(f"{name:10} {text:40} KLD {results[text][name]['kld']:.4f}", err=True)
    lines = [f"| calibration text | {' | '.join(types)} |", f"|---|{'--:|' * len(types)}"]
    for text, row in results.items():
        cells = [f"{row[name]['kld']:.4f} ± {row[name]['kld_error']:.4f}" if name in row else "" for name in types]
        lines.append(f"| {text} | {' | '.join(cells)} |")
    what = f"Demo model, {chunks} windows of {N_CTX} tokens of held-out text (documentation of Python)."
    head = f"# KL divergence by calibration text\n\n{what}\n\n"
    out.with_name(f"{out.name}_texts.json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_name(f"{out.name}_texts.md").write_text(head + "\n".join(lines) + "\n")
    click.echo("\n".join(lines))


@click.command(help=__doc__)
@click.option("--texts", help="Calibration texts to compare, with commas between.")
@click.option("--types", help="Comma-separated; default: all of less than five bits.")
@click.option("--chunks", default=16, show_default=True, help="Windows of held-out text that are scored.")
@click.option("--calibration-chunks", default=80, show_default=True, help="Windows that the imatrix is computed from.")
@click.option("--add", is_flag=True, help="Add to the types that OUT.json has, which is to be of the same windows.")
@click.option("-t", "--threads", default=1, show_default=True)
@click.option(
    "--out", default=RESULTS / "imatrix_quality", type=click.Path(path_type=Path), help="Written to OUT.json, OUT.md."
)
def main(
    texts: str | None, types: str | None, chunks: int, calibration_chunks: int, add: bool, threads: int, out: Path
) -> None:
    if texts:
        chosen = types.split(",") if types else small_types()
        compare_texts(texts.split(","), chosen, chunks, calibration_chunks, threads, out)
        return
    began = time.perf_counter()
    source = open_source(FOLDER / "demo")
    options = {"threads": threads, "exact": True}
    base = load_model(source, **options)
    imatrix, _ = collect(
        base,
        base.tokenizer.encode((FOLDER / "demo/calibration.txt").read_text("utf-8")),
        n_ctx=N_CTX,
        chunks=calibration_chunks,
    )
    importance = Importance(imatrix.means())
    text = base.tokenizer.encode((FOLDER / "demo/heldout.txt").read_text("utf-8"))
    results: dict[str, Any] = {"chunks": chunks, "n_ctx": N_CTX, "calibration_chunks": imatrix.chunk_count, "types": {}}
    seconds = 0.0
    if add:
        earlier = json.loads(out.with_suffix(".json").read_text())
        if any(earlier[key] != results[key] for key in ("chunks", "n_ctx", "calibration_chunks")):
            raise click.UsageError(f"{out}.json is of other windows")
        results["types"], seconds = earlier["types"], earlier["seconds"]
    cache_hidden_states(base)
    results["bf16_perplexity"] = perplexity(base, text, n_ctx=N_CTX, chunks=chunks).perplexity

    def score(name: str, weights: Importance | None) -> dict[str, float | None]:
        model = load_model(quantised(source, name, weights), **options)
        return figures(perplexity(model, text, n_ctx=N_CTX, chunks=chunks, baseline=base))

    for name in types.split(",") if types else small_types():
        try:
            none = score(name, None)
        except PlanError:  # not without importance
            none = None
        row = results["types"][name] = {"bits": bits(name), "none": none, "imatrix": score(name, importance)}
        with_, without = row["imatrix"]["kld"], none["kld"] if none else None
        click.echo(f"{name:10} {bits(name):5.2f} bits  KLD {without or math.nan:.4f} -> {with_:.4f}", err=True)
    results["types"] = {name: results["types"][name] for name in in_order(results["types"])}
    results["seconds"] = round(seconds + time.perf_counter() - began, 1)
    out.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
    out.with_suffix(".md").write_text(markdown(results))
    click.echo(markdown(results))


if __name__ == "__main__":
    main()
