"""How well errors of types predict the KL divergence of mixes of types, and what recipes of equal size they choose.

\\b
    python benchmarks/imatrix/curvature_search.py --out benchmarks/results/curvature_search.json
    python benchmarks/imatrix/curvature_search.py --model second/ --out benchmarks/results/curvature_search_second.json

Errors are weighted by the importance matrix, by the covariance of inputs, and by the curvature of both sides; with the last
they are a KL divergence in nats. For each size there are random mixes (a type drawn for each tensor), whose predicted and
measured divergences are ranked (Spearman), and the recipes that `search` finds by each weighting, without a text or (--text)
with sensitivities that are measured on the calibration text. Everything is encoded with the curvature at effort 1 and judged on
held-out text, weights and activations in float32. Embeddings and output matrix stay bf16. Needs torch.

OUT.json keeps what was measured: the same command again measures what is missing.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import numpy as np
from covariance import SEARCHED, WINDOWS, Bench
from covariance_search import FIXED

import ggufmill
from ggufmill.formats import TYPES, SourceTensor, TensorType, dims
from ggufmill.pipeline.common.covariance import load_covariances
from ggufmill.pipeline.common.importance import load_importance
from ggufmill.quantize import decode, gguf_source
from ggufmill.quantize.row_producer import ErrorWeights, RowProducer
from ggufmill.quantize.search.quant_error import DEFAULT_TYPES, usable_types
from ggufmill.quantize.search.type_search import DERIVED_TENSORS
from ggufmill.recipes import FOLDER
from ggufmill.runtime.evaluate.sensitivity import Reference

N_CTX = 512
WEIGHTINGS = ("imatrix", "covariance", "curvature")
Types = Mapping[str, TensorType]


class MixBench:
    """Mixes of one model's types: what is predicted, and what they lose."""

    def __init__(self, bench: Bench, chunks: int):
        self.bench, work = bench, bench.work
        self.imatrix, self.curvature = work / "all.imatrix", work / "all.curv"
        text = bench.folder / "calibration.txt"
        if not self.curvature.exists():
            ggufmill.compute_imatrix(
                bench.bf16, text, self.imatrix, chunks=WINDOWS, curvature=self.curvature, force=True, threads=bench.threads
            )
        self.source = gguf_source(bench.bf16)
        self.importance = load_importance(self.imatrix, self.source)
        self.covariances = load_covariances(self.curvature, self.source, 1, curvature=True)
        heldout = (bench.folder / "heldout.txt").read_text("utf-8")
        self.reference = Reference(self.source, heldout, N_CTX, chunks, threads=bench.threads, exact=True)
        self.rules = work / "fixed.txt"
        self.rules.write_text(FIXED + "\n", encoding="utf-8")
        self._decoded: dict[tuple[str, str], SourceTensor] = {}

    def options(self, weighting: str) -> dict[str, Any]:
        """Arguments of `search_recipe`."""
        return {} if weighting == "imatrix" else {weighting: self.curvature, "effort": 1}

    def searched(self, bits: float, weighting: str, with_text: bool) -> dict[str, TensorType]:
        """The types that `search` chooses."""
        label = f"{weighting}{'-text' * with_text}"
        found = ggufmill.search_recipe(
            self.bench.bf16,
            self.bench.work / f"{label}.txt",
            target_bpw=self.bench.bits_of_file(bits),
            imatrix=self.imatrix,
            rules=self.rules,
            state=self._state(label),
            threads=self.bench.threads,
            force=True,
            **self.options(weighting),
            **({"text": self.bench.folder / "calibration.txt"} if with_text else {}),
        )
        return dict(found.types)

    def _state(self, label: str) -> Path:
        return self.bench.work / f"{label}.json"

    def predicted(self, types: Types, weighting: str) -> float:
        """The sum of errors, of the tensors that prompts are computed with."""
        errors = json.loads(self._state(weighting).read_text("utf-8"))["errors"]
        counted = [name for name in types if name.split(".", 2)[-1] not in DERIVED_TENSORS]
        return sum(errors[name][types[name].name] for name in counted)

    def measured(self, types: Types) -> tuple[float, float]:
        """KL divergence and its standard error."""
        tensors = {name: self._tensor(name, kind) for name, kind in types.items()}
        found = self.reference.divergence(replace(self.source, tensors={**self.source.tensors, **tensors}))
        return found.mean, found.error

    def _tensor(self, name: str, kind: TensorType) -> SourceTensor:
        if (name, kind.name) not in self._decoded:
            tensor = self.source.tensors[name]
            columns, rows, matrices = dims(tensor.shape)
            produce = RowProducer(tensor, kind, ErrorWeights.of(tensor, self.importance, self.covariances))
            values = np.concatenate([decode(produce(i * rows, (i + 1) * rows), kind.name, columns) for i in range(matrices)])
            self._decoded[name, kind.name] = SourceTensor(
                name, tensor.shape, "f32", lambda start, stop: values[start:stop].astype(np.float32)
            )
        return self._decoded[name, kind.name]

    def random_mix(self, names: list[str], bits: float, rng: np.random.Generator) -> dict[str, TensorType]:
        """A type for each tensor, at random, of which the sum is within 1 % of the size."""
        elements = sum(self.source.tensors[name].n_elements for name in names)
        while True:
            spread, types = rng.uniform(0.3, 3), {}
            for name in names:
                shape = self.source.tensors[name].shape
                usable = usable_types(self.source.tensors[name], [TYPES[each] for each in DEFAULT_TYPES], True)
                sizes = np.array([8 * kind.nbytes(shape) / self.source.tensors[name].n_elements for kind in usable])
                weights = np.exp(-(((sizes - bits) / spread) ** 2) / 2)
                types[name] = usable[rng.choice(len(usable), p=weights / weights.sum())]
            size = 8 * sum(kind.nbytes(self.source.tensors[name].shape) for name, kind in types.items()) / elements
            if abs(size / bits - 1) < 0.01:
                return types


def spearman(a: list[float], b: list[float]) -> float:
    """The rank correlation of two lists without ties."""
    ranks = [np.argsort(np.argsort(each)) for each in (a, b)]
    return float(np.corrcoef(*ranks)[0, 1])


def summary(mixes: list[dict[str, Any]]) -> dict[str, Any]:
    """Rank correlations of each weighting, and the divergence over what curvature predicts (geometric mean, least, largest)."""
    measured = [mix["kld"] for mix in mixes]
    ratios = np.array([mix["kld"] / mix["curvature"] for mix in mixes])
    ranks = {weighting: round(spearman([mix[weighting] for mix in mixes], measured), 3) for weighting in WEIGHTINGS}
    spread = [float(np.exp(np.log(ratios).mean())), float(ratios.min()), float(ratios.max())]
    return {"mixes": len(mixes), "spearman": ranks, "measured_over_predicted": [round(each, 3) for each in spread]}


@click.command(help=__doc__)
@click.option("--model", "folder", default=FOLDER / "demo", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--sizes", default=",".join(map(str, SEARCHED)), show_default=True, help="Bits per weight of the layers.")
@click.option("--mixes", default=30, show_default=True, help="Random mixes of each size.")
@click.option("--text", "with_text", is_flag=True, help="Recipes with measured sensitivities too.")
@click.option("--chunks", type=int, default=48, show_default=True, help="Windows of the held-out text.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Folder for files that can be used again.")
@click.option("-t", "--threads", default=1, show_default=True)
def main(
    folder: Path, out: Path, sizes: str, mixes: int, with_text: bool, chunks: int, work: Path | None, threads: int
) -> None:
    results: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {"recipes": {}, "mixes": {}}
    with tempfile.TemporaryDirectory() as temporary:
        if work is not None:
            work.mkdir(parents=True, exist_ok=True)
        bench = MixBench(Bench(folder, out, work or Path(temporary), chunks, threads), chunks)
        results |= {"model": folder.name, "windows": len(bench.reference.windows), "n_ctx": N_CTX}

        def save() -> None:
            out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

        names: list[str] = []
        for size in sizes.split(","):
            for weighting, text in [(each, flag) for flag in ([False, True] if with_text else [False]) for each in WEIGHTINGS]:
                label = f"{size} {weighting}{' with text' * text}"
                if label in results["recipes"] and names:
                    continue
                types = bench.searched(float(size), weighting, text)
                names = list(types)
                if label in results["recipes"]:
                    continue
                kld, error = bench.measured(types)
                predicted = bench.predicted(types, "curvature") if bench._state("curvature").exists() else None
                results["recipes"][label] = {"kld": kld, "error": error, "predicted": predicted}
                save()
                click.echo(f"{label:30} KLD {kld:.5f} +/- {error:.5f}", err=True)
        for size in sizes.split(","):
            rng, found = np.random.default_rng([7, int(1000 * float(size))]), results["mixes"].setdefault(size, [])
            for number in range(mixes):
                types = bench.random_mix(names, float(size), rng)
                if number < len(found):
                    continue
                kld, error = bench.measured(types)
                found.append({"kld": kld, "error": error, **{each: bench.predicted(types, each) for each in WEIGHTINGS}})
                save()
            results.setdefault("summary", {})[size] = summary(found)
            click.echo(f"{size}: {results['summary'][size]}", err=True)
        results["summary"]["all"] = summary([mix for found in results["mixes"].values() for mix in found])
        save()
        click.echo(f"all: {results['summary']['all']}", err=True)


if __name__ == "__main__":
    main()
