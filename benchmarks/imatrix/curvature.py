"""KL divergence of types encoded with an importance matrix, with the covariance of inputs, with the curvature of both sides.

\\b
    python benchmarks/imatrix/curvature.py --out benchmarks/results/curvature_demo.json --jobs 2
    python benchmarks/imatrix/curvature.py --model second/ --types q4_K,iq2_k --out benchmarks/results/curvature_second.json
    python benchmarks/imatrix/curvature_report.py benchmarks/results/curvature_{demo,second,third,fourth,fifth*,efforts}.json

The model folder (the demo's unless another is given) has `calibration.txt` and `heldout.txt`, which only the judge reads. Files
are written and read as a user would: `imatrix --curvature`, `quantize --curvature --effort --sequential`, `tune`, `perplexity
--kl-divergence` from the bf16 model, with 8-bit activations. Embeddings and output matrix stay bf16. With --study also how much
text is needed, what blocks of rows keep, how far draws of labels differ; --seed: another draw for all types; --longer and
--other: what more text of the same kind does, and text of another. Needs torch.

OUT.json keeps what was measured: the same command again measures what is missing, or was measured on other windows. Each of
--jobs processes has one thread.
"""

from __future__ import annotations

import json
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import click
from covariance import TYPES, WINDOWS, layer_bits, remember

import ggufmill
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Model, load_model

METHODS = ("imatrix", "covariance 1", "covariance 3", "curvature 0", "curvature 1", "curvature 2")
METHODS += ("curvature 1 sequential", "curvature 2 sequential", "curvature 2 sequential tuned")
STUDIED = ("q4_K", "iq3_k", "iq2_k")
STUDY_WINDOWS, STUDY_ROWS, STUDY_SEEDS = (1, 8, 24), (32, 64, 128, 256), (1, 2)
MANY_WINDOWS = 300  # of a longer text


class Calibration(NamedTuple):
    """What second moments are collected from. text: of the folder, or a path; rows: of a block; None: the usual limit."""

    text: str = "calibration.txt"
    windows: int = WINDOWS
    rows: int | None = None
    seed: int | None = None

    @property
    def label(self) -> str:
        """What tells it from the usual one, '' for that."""
        parts = [f"{self.windows} windows"] * (self.windows != WINDOWS) + [f"blocks of {self.rows}"] * (self.rows is not None)
        parts += [f"seed {self.seed}"] * (self.seed is not None)
        return ", ".join([*parts, *([Path(self.text).name] if "/" in self.text else [])])


class Job(NamedTuple):
    """A file that is made and judged; made: elsewhere, already."""

    type: str
    method: str
    calibration: Calibration
    made: Path | None = None

    @property
    def label(self) -> str:
        return f"{self.type}/{self.method}" + f" ({self.calibration.label})" * bool(self.calibration.label)


class Bench:
    """A process that makes and judges files."""

    def __init__(self, folder: Path, work: Path, chunks: int | None):
        self.folder, self.work, self.chunks, self.bf16 = folder, work, chunks, work / "bf16.gguf"
        self._base: Model | None = None

    def files(self, calibration: Calibration) -> tuple[Path, Path]:
        """Importance matrix and curvature."""
        stem = "".join(c if c.isalnum() else "_" for c in calibration.label or "all")
        return self.work / f"{stem}.imatrix", self.work / f"{stem}.curv"

    def text(self, calibration: Calibration) -> Path:
        """What second moments are collected from."""
        return Path(calibration.text) if "/" in calibration.text else self.folder / calibration.text

    def collect(self, calibration: Calibration, threads: int) -> float:
        """Makes both; returns the seconds that it took."""
        imatrix, curvature = self.files(calibration)
        text = self.text(calibration)
        began = time.perf_counter()
        asked = {"curvature_rows": calibration.rows, "curvature_seed": calibration.seed}
        ggufmill.compute_imatrix(
            self.bf16, text, imatrix, chunks=calibration.windows, curvature=curvature, force=True, threads=threads, **asked
        )
        return time.perf_counter() - began

    def measure(self, job: Job) -> dict[str, Any]:
        """Makes a file and judges it."""
        if job.made is not None:
            return self.judge(job.made)
        imatrix, moments = self.files(job.calibration)
        name, *more = job.method.split()
        options: dict[str, Any] = {} if name == "imatrix" else {name: moments, "effort": int(more[0])}
        if "sequential" in more:
            options |= {"sequential": self.text(job.calibration), "sequential_chunks": job.calibration.windows}
        with tempfile.TemporaryDirectory(dir=self.work) as folder:
            path, tuned = Path(folder) / "quantised.gguf", Path(folder) / "tuned.gguf"
            began = time.process_time()
            ggufmill.quantize_model(
                self.bf16,
                path,
                custom_q=rf"^blk\.={job.type}",
                imatrix=imatrix,
                ignore_imatrix_rules=True,
                threads=1,
                **options,
            )
            if "tuned" in more:
                ggufmill.tune_model(
                    self.bf16, path, tuned, text=self.text(job.calibration), chunks=job.calibration.windows, threads=1
                )
                path = tuned
            seconds = time.process_time() - began
            return {"processor_seconds": round(seconds, 1), **self.judge(path)}

    def judge(self, path: Path) -> dict[str, Any]:
        """What the held-out text says of a file; `model`: of the run."""
        if self._base is None:
            self._base = load_model(self.bf16, threads=1)
            remember(self._base)
        model = load_model(path, threads=1)
        result = ggufmill.perplexity(model, self.folder / "heldout.txt", kl_divergence=self._base, chunks=self.chunks)
        return {
            "bits": layer_bits(path),
            "kld": result.kld_mean,
            "error": result.kld_error,
            "perplexity": result.perplexity,
            "top1": result.top1_agreement,
            "windows": result.chunks,
            "model": {
                "windows": result.chunks,
                "n_ctx": result.n_ctx,
                "program": result.program,
                "bf16_perplexity": result.baseline_perplexity,
            },
        }


_bench: Bench | None = None


def _start(*arguments: Any) -> None:
    global _bench
    _bench = Bench(*arguments)


def _measure(job: Job) -> tuple[Job, dict[str, Any] | str]:
    assert _bench is not None
    try:
        return job, _bench.measure(job)
    except ggufmill.MillError as error:
        return job, str(error)


def jobs_of(
    types: list[str], methods: list[str], study: bool, other: Path | None, longer: Path | None, seed: int | None = None
) -> list[Job]:
    """All that is measured, the longest last in each type."""
    usual = Calibration(seed=seed)
    jobs = [Job(name, method, usual) for method in methods for name in types]
    if study:
        studied = [Calibration(windows=n) for n in STUDY_WINDOWS] + [Calibration(rows=n) for n in STUDY_ROWS]
        studied += [Calibration(seed=n) for n in STUDY_SEEDS]
        jobs += [Job(name, "curvature 1", each) for name in STUDIED for each in studied]
        few = [Calibration(windows=n) for n in STUDY_WINDOWS]
        jobs += [Job(name, "curvature 1 sequential", each) for name in STUDIED for each in few]
    if other is not None:
        elsewhere = Calibration(str(other.resolve()))
        jobs += [Job(name, method, elsewhere) for name in STUDIED for method in ("imatrix", "covariance 1", "curvature 1")]
    if longer is not None:
        many = Calibration(str(longer.resolve()), MANY_WINDOWS)
        jobs += [Job(name, method, many) for name in STUDIED for method in ("imatrix", "curvature 1")]
    return jobs


def made_elsewhere(made: str) -> list[Job]:
    """Of TYPE/NAME=FILE,..."""
    parts = [each.replace("=", "/", 1).split("/", 2) for each in made.split(",") if each]
    return [Job(name, method, Calibration(), Path(path)) for name, method, path in parts]


def is_measured(found: dict[str, Any] | None, chunks: int | None) -> bool:
    """Whether a file was judged on so many windows (None: all, which no number tells)."""
    return found is not None and chunks in (None, found["windows"])


@click.command(help=__doc__)
@click.option("--model", "folder", default=FOLDER / "demo", type=click.Path(exists=True, path_type=Path))
@click.option("--out", required=True, type=click.Path(dir_okay=False, path_type=Path))
@click.option("--types", help="Comma-separated, instead of all of at most 4.5 bits.")
@click.option("--methods", default=",".join(METHODS), show_default=True)
@click.option("--chunks", type=int, help="Windows of the held-out text.  [default: all]")
@click.option("--study", is_flag=True, help="Amounts of text, blocks of rows, draws of labels too.")
@click.option("--seed", type=int, help="Another draw of labels for --methods.")
@click.option("--other", type=click.Path(exists=True, path_type=Path), help="A text of another kind to calibrate with too.")
@click.option(
    "--longer", type=click.Path(exists=True, path_type=Path), help=f"A text of the same kind of {MANY_WINDOWS} windows."
)
@click.option("--made", default="", help="Files that other programs made, TYPE/NAME=FILE,..., to be judged too.")
@click.option("--work", type=click.Path(file_okay=False, path_type=Path), help="Folder for files that can be used again.")
@click.option("--jobs", "processes", default=1, show_default=True, help="Processes of one thread.")
def main(
    folder: Path,
    out: Path,
    types: str | None,
    methods: str,
    chunks: int | None,
    study: bool,
    seed: int | None,
    other: Path | None,
    longer: Path | None,
    made: str,
    work: Path | None,
    processes: int,
) -> None:
    names = types.split(",") if types else ",".join(TYPES[each] for each in ("scalar", "codebook", "trellis")).split(",")
    with tempfile.TemporaryDirectory() as temporary:
        work = work or Path(temporary)
        work.mkdir(parents=True, exist_ok=True)
        bench = Bench(folder, work, chunks)
        if not bench.bf16.exists():
            ggufmill.convert_model(folder, bench.bf16, outtype="bf16")
        results: dict[str, Any] = json.loads(out.read_text("utf-8")) if out.exists() else {"files": {}, "collecting": {}}
        results["model"] = folder.name
        files = results["files"]
        jobs = jobs_of(names, methods.split(","), study, other, longer, seed) + made_elsewhere(made)
        jobs = [job for job in jobs if not is_measured(files.get(job.label), chunks)]
        for calibration in dict.fromkeys(job.calibration for job in jobs):
            if not bench.files(calibration)[1].exists():
                results["collecting"][calibration.label or "all"] = round(bench.collect(calibration, processes), 1)
                click.echo(f"{calibration.label or 'all'}: {results['collecting'][calibration.label or 'all']} s", err=True)
        context = get_context("spawn")
        with ProcessPoolExecutor(processes, context, _start, (folder, work, chunks)) as pool:
            for job, found in pool.map(_measure, jobs):
                if isinstance(found, str):
                    click.echo(f"{job.label}: {found}", err=True)
                    continue
                results |= found.pop("model")
                results["files"][job.label] = found
                out.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
                click.echo(f"{job.label:40} KLD {found['kld']:.5f} +/- {found['error']:.5f}", err=True)


if __name__ == "__main__":
    main()
