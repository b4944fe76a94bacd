"""KL divergence over bits per weight: no calibration, importance matrix, covariance at each effort, stock mixes, `search`.

\\b
    python benchmarks/imatrix/covariance.py --out benchmarks/results/covariance_demo.json
    python benchmarks/imatrix/covariance.py --model second/ --out benchmarks/results/covariance_second.json
    python benchmarks/imatrix/covariance_report.py benchmarks/results/covariance_{demo,second}.json

The model folder (the demo's unless another is given) has `calibration.txt`, from which importance matrix and covariance are
collected, and `heldout.txt`, which only the judge reads. Files are written and read as a user would: `imatrix --covariance`,
`quantize --covariance --effort`, `perplexity --kl-divergence` from the bf16 model, with the runtime's kernels and 8-bit
activations. Embeddings and output matrix stay bf16 in every file; bits per weight are those of the layers' matrices.

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

import ggufmill
from ggufmill.errors import MillError
from ggufmill.formats import open_gguf
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Model, load_model

TYPES = {  # families of types, those of at most 4.5 bits per weight
    "scalar": "q4_0,iq4_nl,q4_K,iq4_k,iq4_xs,iq4_ks,mxfp4,iq4_kss,q3_K,iq3_k,iq3_ks,iq2_kl,q2_K,iq2_k,iq2_ks",
    "codebook": "iq3_s,iq3_xxs,iq2_s,iq2_xs,iq2_xxs,iq1_m,iq1_s",
    "trellis": "iq4_kt,iq3_kt,iq2_kt,iq1_kt",
    "larger": "q5_K,iq5_ks,iq5_k,q6_K",
}
MIXES = "Q2_K,Q3_K_M,Q4_K_S,Q4_K_M,IQ2_M,IQ3_XS,IQ3_M,IQ4_XS,IQ4_K"
SEARCHED = (2.5, 3.1, 3.6, 4.3)  # bits per weight of the layers that `search` is given
WINDOWS = 80  # of calibration; results of other numbers have it in their label
EXCEPT_LAYERS = {"token_embedding_type": "bf16", "output_tensor_type": "bf16"}


def remember(model: Model) -> None:
    """Keeps the outputs of the baseline, which sees the same windows for every file."""
    answers, compute = {}, model.hidden

    def hidden(batch: Any, *rest: Any, **options: Any) -> Any:
        key = b"".join(np.asarray(tokens, np.int64).tobytes() for _, tokens in batch)
        if key not in answers:
            answers[key] = compute(batch, *rest, **options)
        return answers[key]

    model.hidden = hidden


def _is_layer(name: str, tensor: Any) -> bool:
    """Whether this is a matrix of a layer that is quantised: norms and routers stay float32."""
    return name.startswith("blk.") and tensor.type.name != "f32"


def layer_bits(path: Path) -> float:
    """Bits per weight of the matrices of the layers."""
    tensors = [t for name, t in open_gguf(path).tensors.items() if _is_layer(name, t)]
    return 8 * sum(t.nbytes for t in tensors) / sum(int(np.prod(t.shape)) for t in tensors)


class Bench:
    """One model with its texts; results go to a JSON file after each measurement."""

    def __init__(self, folder: Path, out: Path, work: Path, chunks: int | None, threads: int):
        self.folder, self.out, self.work, self.chunks, self.threads = folder, out, work, chunks, threads
        self.bf16 = work / "bf16.gguf"
        if not self.bf16.exists():
            ggufmill.convert_model(folder, self.bf16, outtype="bf16", threads=threads)
        self.base = load_model(self.bf16, threads=threads)
        remember(self.base)
        self.results: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {"files": {}}
        tensors = open_gguf(self.bf16).tensors
        self.layer_weights = sum(int(np.prod(t.shape)) for name, t in tensors.items() if _is_layer(name, t))
        self.results |= {"model": folder.name, "layer_weights": self.layer_weights}

    def calibrate(self, windows: int, covariance: bool) -> tuple[Path, Path]:
        """The files of the importance matrix and, if asked for, the covariance of this many windows of calibration.txt."""
        imatrix, cov = self.work / f"{windows}.imatrix", self.work / f"{windows}.cov"
        if not imatrix.exists() or (covariance and not cov.exists()):
            began = time.perf_counter()
            extra: dict[str, Any] = {"covariance": cov, "covariance_experts": True} if covariance else {}
            ggufmill.compute_imatrix(
                self.bf16, self.folder / "calibration.txt", imatrix, chunks=windows, force=True, threads=self.threads, **extra
            )
            self.results.setdefault("seconds", {})[f"imatrix{windows}{'+covariance' * covariance}"] = (
                time.perf_counter() - began
            )
        return imatrix, cov

    def measure(self, label: str, *arguments: Any, **options: Any) -> None:
        """Writes a file with `quantize_model` and judges it, unless OUT.json has this label already."""
        files = self.results["files"]
        if label in files:
            return
        path = self.work / "quantised.gguf"
        began = time.perf_counter()
        try:
            ggufmill.quantize_model(
                self.bf16, path, *arguments, force=True, threads=self.threads, ignore_imatrix_rules=True, **options
            )
        except MillError as error:
            click.echo(f"{label}: {error}", err=True)
            return
        seconds = time.perf_counter() - began
        result = self.judge(path)
        files[label] = {"bits": layer_bits(path), "seconds": round(seconds, 1), **result}
        self.out.write_text(json.dumps(self.results, indent=1) + "\n")
        click.echo(f"{label:28} {files[label]['bits']:.3f} bits  KLD {result['kld']:.5f} +/- {result['error']:.5f}", err=True)

    def judge(self, path: Path) -> dict[str, Any]:
        """Perplexity and KL divergence from bf16 on heldout.txt."""
        model = load_model(path, threads=self.threads)
        result = ggufmill.perplexity(model, self.folder / "heldout.txt", kl_divergence=self.base, chunks=self.chunks)
        self.results |= {"windows": result.chunks, "n_ctx": result.n_ctx, "program": result.program}
        self.results["bf16_perplexity"] = result.baseline_perplexity
        return {
            "kld": result.kld_mean,
            "error": result.kld_error,
            "perplexity": result.perplexity,
            "top1": result.top1_agreement,
        }

    def bits_of_file(self, bits: float) -> float:
        """Bits per weight of a whole file whose layers have this many."""
        tensors = open_gguf(self.bf16).tensors
        total = sum(int(np.prod(t.shape)) for t in tensors.values())
        return (bits * self.layer_weights + sum(8 * t.nbytes for n, t in tensors.items() if not _is_layer(n, t))) / total


def measure_types(bench: Bench, types: list[str], windows: int, efforts: list[int]) -> None:
    """Every type without calibration, with an importance matrix, and with the covariance at each effort.

    With another number of windows than WINDOWS, the covariance only.
    """
    imatrix, covariance = bench.calibrate(windows, bool(efforts))
    suffix = f" of {windows}" if windows != WINDOWS else ""
    for name in types:
        rules = rf"^blk\.={name}"
        if not suffix:
            bench.measure(f"{name}/none", custom_q=rules)
            bench.measure(f"{name}/imatrix", custom_q=rules, imatrix=imatrix)
        for effort in efforts:
            bench.measure(
                f"{name}/effort{effort}{suffix}", custom_q=rules, imatrix=imatrix, covariance=covariance, effort=effort
            )


def measure_recipes(bench: Bench, windows: int, efforts: list[int]) -> None:
    """Stock mixes and recipes that are searched for, with the importance matrix and with the covariance."""
    imatrix, covariance = bench.calibrate(windows, bool(efforts))
    calibrations: dict[str, dict[str, Any]] = {"imatrix": {"imatrix": imatrix}}
    if efforts:
        calibrations["effort1"] = {"imatrix": imatrix, "covariance": covariance, "effort": 1}
    for label, options in calibrations.items():
        for name in MIXES.split(","):
            bench.measure(f"{name}/{label}", name, **options, **EXCEPT_LAYERS)
        for bits in SEARCHED:
            bench.measure(
                f"search {bits}/{label}",
                target_bpw=bench.bits_of_file(bits),
                calibration=bench.folder / "calibration.txt",
                custom_q=r"^(token_embd|output)\.weight=bf16",
                **options,
            )


@click.command(help=__doc__)
@click.option("--model", "folder", default=FOLDER / "demo", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--types", help="Comma-separated, instead of all.")
@click.option("--efforts", default="1,2,3", show_default=True, help="Of the covariance; '' for none.")
@click.option("--windows", default=WINDOWS, show_default=True, help="Windows of the calibration text.")
@click.option("--chunks", type=int, help="Windows of the held-out text.  [default: all]")
@click.option("--recipes/--no-recipes", default=True, help="Stock mixes and `search`.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Folder for files that can be used again.")
@click.option("-t", "--threads", default=1, show_default=True)
def main(
    folder: Path,
    out: Path,
    types: str | None,
    efforts: str,
    windows: int,
    chunks: int | None,
    recipes: bool,
    work: Path | None,
    threads: int,
) -> None:
    names = types.split(",") if types else ",".join(TYPES.values()).split(",")
    levels = [int(effort) for effort in efforts.split(",") if effort]
    with tempfile.TemporaryDirectory() as temporary:
        if work is not None:
            work.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, out, work or Path(temporary), chunks, threads)
        measure_types(bench, names, windows, levels)
        if recipes:
            measure_recipes(bench, windows, levels)


if __name__ == "__main__":
    main()
