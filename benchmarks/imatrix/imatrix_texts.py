"""Which text an importance matrix should be computed on: the model's own, the bundled one, of the held-out text's kind, others.

\b
    python benchmarks/imatrix/imatrix_texts.py demo -f same=demo/train.txt -f self -f bundled --judge same=demo/heldout.txt
    python benchmarks/imatrix/imatrix_texts.py MODEL -f wiki=a.txt -f self --judge wiki=b.txt --judge bundled --out out/texts

All weights of the layers become each type, embeddings and output matrix stay. For each text that is judged with, the table has
the KL divergence over that without an importance matrix (geometric mean of the types). The model writes its own text (`self`)
as `imatrix -f self` does, and that which is judged with by another seed. The bundled text is judged with behind the windows
that are calibrated with.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from imatrix_quality import N_CTX, RESULTS, cache_hidden_states, quantised

from ggufmill.convert import open_source
from ggufmill.imatrix.collect import collect
from ggufmill.imatrix.own_text import fingerprint, is_written, own_tokens, write_own_text
from ggufmill.imatrix.texts import calibration_tokens
from ggufmill.quantize.importance import Importance
from ggufmill.recipes import FOLDER, bundled, bundled_text
from ggufmill.runtime import Model, load_model
from ggufmill.runtime.evaluate.perplexity import perplexity


def parsed(texts: tuple[str, ...]) -> dict[str, Path]:
    """NAME=FILE, `self` and `bundled` -> name and file."""
    named = [text.partition("=")[::2] for text in texts]
    return {name: bundled(path) if path else bundled_text() if name == "bundled" else Path() for name, path in named}


def tokens_of(model: Model, path: Path) -> np.ndarray:
    return np.asarray(calibration_tokens(path, model.tokenizer, model.metadata))


def markdown(results: dict[str, Any]) -> str:
    names = results["calibration"]
    lines = [
        f"{results['model']}, types {', '.join(results['types'])}; {results['calibration_chunks']} windows of calibration, "
        f"{results['chunks']} of held-out text. KL divergence over that without an importance matrix, geometric mean; in "
        "brackets the largest.",
        "",
        "| judged with | " + " | ".join(names) + " |",
        "|---" + "|--:" * len(names) + "|",
    ]
    for judged, rows in results["judged"].items():
        ratios = {name: [row[name] / row["none"] for row in rows.values()] for name in names}
        means = {name: math.exp(float(np.mean(np.log(each)))) for name, each in ratios.items()}
        lines.append(f"| {judged} | " + " | ".join(f"{means[name]:.3f} ({max(ratios[name]):.3f})" for name in names) + " |")
    return "\n".join(lines) + "\n"


@click.command(help=__doc__)
@click.argument("model", type=str)
@click.option("-f", "--file", "texts", multiple=True, required=True, help="NAME=FILE, self or bundled: to calibrate on.")
@click.option("--judge", "judges", multiple=True, required=True, help="NAME=FILE, self or bundled: held-out text.")
@click.option("--types", default="iq4_k,iq3_k,iq2_k", show_default=True)
@click.option("--chunks", default=16, show_default=True, help="Windows of each held-out text.")
@click.option("--calibration-chunks", default=80, show_default=True, help="Windows that a matrix is computed from.")
@click.option("--seed", default=0, show_default=True, help="Of the model's own text.")
@click.option("-t", "--threads", default=1, show_default=True)
@click.option("--out", default=RESULTS / "imatrix_texts", type=click.Path(path_type=Path), help="Written to OUT.json, OUT.md.")
def main(
    model: str,
    texts: tuple[str, ...],
    judges: tuple[str, ...],
    types: str,
    chunks: int,
    calibration_chunks: int,
    seed: int,
    threads: int,
    out: Path,
) -> None:
    source = open_source(FOLDER / model if model == "demo" else model)
    options = {"threads": threads, "exact": True}
    base = load_model(source, **options)
    out.parent.mkdir(parents=True, exist_ok=True)

    def own_text(own_seed: int, windows: int) -> Path:
        file, began = out.with_suffix(f".{source.architecture}.{own_seed}.jsonl"), time.process_time()
        writer, tokens = load_model(source, threads=threads), own_tokens(windows * N_CTX)
        if not is_written(file, fingerprint(writer, tokens, own_seed)):
            write_own_text(writer, file, tokens, own_seed)
            click.echo(f"self: {tokens} tokens in {time.process_time() - began:.0f} s of processor time", err=True)
        return file

    importance: dict[str, Importance | None] = {"none": None}
    for name, path in parsed(texts).items():
        file = own_text(seed, calibration_chunks) if name == "self" else path
        imatrix, _ = collect(base, tokens_of(base, file), n_ctx=N_CTX, chunks=calibration_chunks)
        importance[name] = Importance(imatrix.means())
        click.echo(f"{name}: {imatrix.chunk_count} windows", err=True)
    files = {name: own_text(seed + 1, chunks) if name == "self" else path for name, path in parsed(judges).items()}
    judged = {name: tokens_of(base, path) for name, path in files.items()}
    if "bundled" in judged:
        judged["bundled"] = judged["bundled"][calibration_chunks * N_CTX :]
    cache_hidden_states(base)
    about = {"model": Path(source.path).name, "calibration_chunks": calibration_chunks, "chunks": chunks}
    names = [name for name in importance if name != "none"]
    results: dict[str, Any] = {**about, "types": types.split(","), "calibration": names, "judged": {n: {} for n in judged}}
    for kind in types.split(","):
        for name, weights in importance.items():
            changed = load_model(quantised(source, kind, weights), **options)
            for text, tokens in judged.items():
                kld = perplexity(changed, tokens, n_ctx=N_CTX, chunks=chunks, baseline=base).kld_mean
                results["judged"][text].setdefault(kind, {})[name] = kld
            click.echo(f"{kind} {name}: {[round(results['judged'][t][kind][name], 5) for t in judged]}", err=True)
    earlier = json.loads(out.with_suffix(".json").read_text()) if out.with_suffix(".json").exists() else {}
    earlier[about["model"]] = results
    out.with_suffix(".json").write_text(json.dumps(earlier, indent=1) + "\n")
    out.with_suffix(".md").write_text("# Which text to calibrate on\n\n" + "\n".join(map(markdown, earlier.values())))
    click.echo(markdown(results))


if __name__ == "__main__":
    main()
