"""Encoding errors on real and on heavy-tailed rows, relative to the reference library's encoders.

\\b
    GGML_LIBRARY=path/to/libggml.so python benchmarks/quality.py
    GGML_LIBRARY=... python benchmarks/quality.py --model some-checkpoint/ --imatrix some.imatrix --json quality.json

Data: rows of Student-t(2.5), of Gauss with single spikes, and up to 48 rows of every weight tensor of each --model (default:
the demo checkpoint, with an imatrix computed here). A figure is the squared error of our bytes over that of the reference's,
both decoded by us: below 1 is better. With importance the error is weighted by it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from statistics import geometric_mean

import click
import numpy as np
from ggml_library import Library

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, TensorType
from ggufmill.imatrix import load
from ggufmill.imatrix.collect import collect
from ggufmill.quantize import can_encode, decode, encode
from ggufmill.quantize.importance import Importance
from ggufmill.quantize.recipes.type_selection import is_quantizable
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

Sample = tuple[str, np.ndarray, np.ndarray | None]  # name of the data, rows, importance
ROWS = 48


def synthetic() -> Iterator[Sample]:
    rng = np.random.default_rng(3)
    importance = (rng.chisquare(2, size=2048) + 0.01).astype(np.float32)
    heavy = (rng.standard_t(2.5, size=(ROWS, 2048)) * 0.02).astype(np.float32)
    spikes = rng.standard_normal((ROWS, 2048)).astype(np.float32) * 0.02
    spikes[rng.random(spikes.shape) < 0.002] *= 20
    yield "student-t 2.5", heavy, importance
    yield "spikes", spikes, importance


def of_model(path: Path, imatrix: Path | None) -> Iterator[Sample]:
    """Rows of every weight tensor, spread over its experts, with the importance of their columns."""
    source = open_source(path)
    if imatrix is not None:
        means = load(imatrix).fit(source, str(imatrix)).means()
    else:
        model = load_model(source)
        text = (FOLDER / "demo/calibration.txt").read_text("utf-8")
        means = collect(model, model.tokenizer.encode(text), chunks=20)[0].means()
    importance = Importance(means)
    for tensor in source.tensors.values():
        if is_quantizable(tensor):
            weights = importance.for_tensor(tensor)
            yield path.name, tensor.read(0, min(ROWS, tensor.shape[1])), None if weights is None else weights[0]


def squared(x: np.ndarray, q: np.ndarray, tensor_type: TensorType, weights: np.ndarray | None) -> float:
    off = (decode(q, tensor_type.name, x.shape[1]).astype(np.float64) - x) ** 2
    return float((off * (1.0 if weights is None else weights.astype(np.float64))).sum())


def measure(tensor_type: TensorType, samples: list[Sample], library: Library) -> dict[str, float]:
    """'data, im' or 'data, no' -> our squared error over the reference's, summed over the data's tensors."""
    sums: dict[str, list[float]] = {}
    for name, x, importance in samples:
        if x.shape[1] % max(tensor_type.block, 32) or len(x) % tensor_type.rows:
            continue
        for label, weights in (("im", importance), ("no", None)):
            if (label == "im" and weights is None) or not library.encodes(tensor_type, weights):
                continue
            ours = squared(x, encode(x, tensor_type.name, weights), tensor_type, weights)
            theirs = squared(x, library.encode(x, tensor_type, weights).reshape(len(x), -1), tensor_type, weights)
            entry = sums.setdefault(f"{name}, {label}", [0.0, 0.0])
            entry[0], entry[1] = entry[0] + ours, entry[1] + theirs
    return {key: ours / theirs for key, (ours, theirs) in sums.items() if theirs}


@click.command(help=__doc__)
@click.option("--model", "models", multiple=True, type=click.Path(exists=True, path_type=Path), help="Checkpoint or GGUF.")
@click.option("--imatrix", "imatrices", multiple=True, type=click.Path(exists=True, path_type=Path), help="One per --model.")
@click.option("--types", help="Comma-separated; default: all plain types that can be encoded.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(models: tuple[Path, ...], imatrices: tuple[Path, ...], types: str | None, json_file: Path | None) -> None:
    path = os.environ.get("GGML_LIBRARY")
    if path is None:
        raise click.UsageError("GGML_LIBRARY has to name the reference's shared library")
    library, samples = Library(Path(path)), list(synthetic())
    for i, model in enumerate(models or (FOLDER / "demo",)):
        samples += of_model(model, imatrices[i] if i < len(imatrices) else None)
    plain = [
        tensor_type
        for tensor_type in TYPES.values()
        if tensor_type.base is None and not tensor_type.is_float and can_encode(tensor_type)
    ]
    tensor_types = [TYPES[name] for name in types.split(",")] if types else plain
    results = {
        tensor_type.name: measure(tensor_type, samples, library) for tensor_type in tensor_types if library.has(tensor_type)
    }
    columns = sorted({key for errors in results.values() for key in errors})
    click.echo("  ".join(["type".ljust(10), *columns]))
    for name, errors in results.items():
        cells = [f"{errors[key]:.4f}" if key in errors else "-" for key in columns]
        click.echo("  ".join([name.ljust(10), *(c.rjust(len(key)) for c, key in zip(cells, columns, strict=True))]))
    for key in columns:
        ratios = [errors[key] for errors in results.values() if key in errors]
        click.echo(f"{key}: geometric mean {geometric_mean(ratios):.4f} over {len(ratios)} types, largest {max(ratios):.5f}")
    if json_file:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
