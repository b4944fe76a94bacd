"""Whether recipes for a size are better when errors of types are weighted by covariances instead of their diagonals.

\\b
    python benchmarks/imatrix/covariance_search.py --out benchmarks/results/covariance_search.json
    python benchmarks/imatrix/covariance_report.py benchmarks/results/covariance_{demo,second}.json

For each size `search` finds two recipes, one with the importance matrix and one with the covariance, with and without a text to
measure sensitivities on. All are then encoded with the covariance and judged on held-out text by KL divergence from the bf16
model, as shipped: packed weights, 8-bit activations. Both recipes are judged on the same predictions, so that the error of the
ratio is that of paired differences. Embeddings and output matrix stay bf16; sizes are bits per weight of the layers' matrices.

OUT.json keeps what was measured: the same command again measures what is missing.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
from covariance import SEARCHED, WINDOWS, Bench, layer_bits

import ggufmill
from ggufmill.quantize import gguf_source
from ggufmill.recipes import FOLDER
from ggufmill.runtime.evaluate.sensitivity import Reference

N_CTX = 512
FIXED = r"^(token_embd|output)\.weight=bf16"


class SearchBench:
    """Recipes of one model for several sizes, and what their files lose."""

    def __init__(self, bench: Bench, reference: Reference, effort: int):
        self.bench, self.reference, self.effort = bench, reference, effort
        self.imatrix, self.covariance = bench.calibrate(WINDOWS, covariance=True)
        self.rules = bench.work / "fixed.txt"
        self.rules.write_text(FIXED + "\n", encoding="utf-8")

    def divergences(self, bits: float, with_covariance: bool, with_text: bool) -> tuple[np.ndarray, dict[str, Any]]:
        """KL divergence at each prediction of the file for a size, and how it came about."""
        work, weighting = self.bench.work, "covariance" if with_covariance else "imatrix"
        label, began = f"{weighting}{'-text' * with_text}", time.process_time()
        options: dict[str, Any] = {"covariance": self.covariance, "effort": self.effort} if with_covariance else {}
        options |= {"text": self.bench.folder / "calibration.txt"} if with_text else {}
        found = ggufmill.search_recipe(
            self.bench.bf16,
            work / f"{label}.txt",
            target_bpw=self.bench.bits_of_file(bits),
            imatrix=self.imatrix,
            rules=self.rules,
            state=work / f"{label}.json",
            threads=self.bench.threads,
            force=True,
            **options,
        )
        seconds, path = time.process_time() - began, work / "searched.gguf"
        common = {"imatrix": self.imatrix, "covariance": self.covariance, "effort": self.effort}
        ggufmill.quantize_model(
            self.bench.bf16, path, recipe=found.out, force=True, ignore_imatrix_rules=True, threads=self.bench.threads, **common
        )
        values = self.reference.divergences(gguf_source(path)).astype(np.float64)
        figures = {
            "bits": layer_bits(path),
            "kld": values.mean(),
            "error": _error(values),
            "predicted": found.assignment.predicted,
        }
        return values, {**figures, "seconds": round(seconds, 1), "recipe": found.text}

    def compare(self, bits: float, with_text: bool) -> dict[str, Any]:
        """Both choices, and the ratio of their divergences with the error of paired differences."""
        old, by_imatrix = self.divergences(bits, False, with_text)
        new, by_covariance = self.divergences(bits, True, with_text)
        ratio = new.mean() / old.mean()
        error = _error(new - ratio * old) / old.mean()
        return {"imatrix": by_imatrix, "covariance": by_covariance, "ratio": ratio, "ratio_error": error}


def _error(values: np.ndarray) -> float:
    """The standard error of the mean, from means of blocks of 32 predictions: neighbours depend on each other."""
    blocks = values[: len(values) // 32 * 32].reshape(-1, 32).mean(1)
    return float(blocks.std(ddof=1) / np.sqrt(len(blocks)))


@click.command(help=__doc__)
@click.option("--model", "folder", default=FOLDER / "demo", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--sizes", default=",".join(map(str, SEARCHED)), show_default=True, help="Bits per weight of the layers.")
@click.option("--effort", default=1, show_default=True)
@click.option("--chunks", type=int, default=48, show_default=True, help="Windows of the held-out text.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Folder for files that can be used again.")
@click.option("-t", "--threads", default=1, show_default=True)
def main(folder: Path, out: Path, sizes: str, effort: int, chunks: int, work: Path | None, threads: int) -> None:
    results: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {"sizes": {}}
    with tempfile.TemporaryDirectory() as temporary:
        if work is not None:
            work.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, out, work or Path(temporary), chunks, threads)
        text = (folder / "heldout.txt").read_text("utf-8")
        reference = Reference(gguf_source(bench.bf16), text, N_CTX, chunks, threads=threads)
        search = SearchBench(bench, reference, effort)
        results |= {"model": folder.name, "effort": effort, "windows": len(reference.windows), "n_ctx": N_CTX}
        for with_text in (False, True):
            for bits in sizes.split(","):
                label = f"{bits}{'' if with_text else ' without text'}"
                if label in results["sizes"]:
                    continue
                row = search.compare(float(bits), with_text)
                results["sizes"][label] = row
                out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                click.echo(
                    f"{label:18} {row['imatrix']['kld']:.5f} {row['covariance']['kld']:.5f}  ratio {row['ratio']:.3f} "
                    f"+/- {row['ratio_error']:.3f}",
                    err=True,
                )


if __name__ == "__main__":
    main()
