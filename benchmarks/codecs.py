"""Encoders and decoders of tensor types side by side: ours, the reference library's and those of the `gguf` package.

\b
    python benchmarks/codecs.py
    GGML_LIBRARY=path/to/libggml.so python benchmarks/codecs.py --json codecs.json --plot codecs.png

Contenders: ours; the fork's library that GGML_LIBRARY names (reference); llama.cpp's, if llama-cpp-python is installed
(mainline); the `gguf` package's numpy code (gguf). Weights are 64 rows x 2048, Student-t(5) * 0.02, importance is
chi2(2) + 0.01. Every contender runs on one thread; per type their runs alternate, so that a busy machine slows down all.
Speeds are million elements per second, best of --repeat, of whole calls that allocate their result: `encode` with its checks,
the library's functions through ctypes; the spread of a contender is how much longer its median run took
than its best (the table has the largest of a type). Errors are squared errors, weighted by importance where there is
importance, relative to the other contender's.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from statistics import geometric_mean, median

import click
import gguf
import numpy as np
from ggml_library import Library, Mainline
from gguf.quants import dequantize, quantize

from ggufmill.formats import TYPES, MillError, TensorType
from ggufmill.operating_system.processors import processor_name
from ggufmill.pipeline.reports.style import COLOURS, INK, new_axes, place_labels, save_figure, styled
from ggufmill.quantize import can_encode, decode, encode

ROWS, COLUMNS = 64, 2048
_LEAST_SECONDS = 1e-4  # of a run
OURS, REFERENCE, MAINLINE, GGUF = "ours", "reference", "mainline", "gguf"
TASKS = {"importance": "encode with importance", "plain": "encode without", "decode": "decode"}


@dataclass
class Speed:
    """Million elements per second of the best run, and by how much more the median run took (0.02: two percent)."""

    best: float
    spread: float


@dataclass
class Row:
    """What was measured of one type: task -> contender -> Speed, and task -> contender -> squared error over that of zeros."""

    type: str
    bits: float
    speed: dict[str, dict[str, Speed]] = field(default_factory=dict)
    error: dict[str, dict[str, float]] = field(default_factory=dict)

    def ratio(self, task: str, other: str) -> float | None:
        """How many times as fast as `other` ours is."""
        speeds = self.speed.get(task, {})
        return speeds[OURS].best / speeds[other].best if other in speeds else None

    def error_ratio(self, task: str, other: str) -> float | None:
        errors = self.error.get(task, {})
        return errors[OURS] / errors[other] if other in errors else None


def samples() -> tuple[np.ndarray, np.ndarray]:
    """float32 weights [64, 2048] and importance [2048]."""
    rng = np.random.default_rng(1)
    x = (rng.standard_t(5, size=(ROWS, COLUMNS)) * 0.02).astype(np.float32)
    return x, (rng.chisquare(2, size=COLUMNS) + 0.01).astype(np.float32)


def race(
    contenders: dict[str, Callable[[], np.ndarray]], repeat: int, clock: Callable[[], float]
) -> tuple[dict[str, Speed], dict[str, np.ndarray]]:
    """Speeds by a clock in seconds, and results; every contender runs once to warm up, then their runs alternate.

    A run is as many calls as take _LEAST_SECONDS: to ask for the thread's time takes 0.4 us, and some calls take 7."""
    results, calls = {name: run() for name, run in contenders.items()}, {}
    for name, run in contenders.items():
        start = clock()
        run()
        calls[name] = 1 + int(_LEAST_SECONDS / max(clock() - start, _LEAST_SECONDS / 1000))
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for _ in range(repeat):
        for name, run in contenders.items():
            run()  # the one before has left its own data in the caches
            start = clock()
            for _ in range(calls[name]):
                run()
            times[name].append((clock() - start) / calls[name])
    speeds = {name: Speed(ROWS * COLUMNS / min(t) / 1e6, median(t) / min(t) - 1) for name, t in times.items()}
    return speeds, results


def _gguf_type(tensor_type: TensorType) -> gguf.GGMLQuantizationType | None:
    """The type as the `gguf` package knows it."""
    known = gguf.GGMLQuantizationType.__members__.get(tensor_type.name.upper())
    return known if known is not None and known.value == tensor_type.id else None


def _can(function: Callable, *args) -> bool:
    try:
        function(*args)
    except (MillError, NotImplementedError, KeyError):
        return False
    return True


def measure(tensor_type: TensorType, libraries: dict[str, Library], repeat: int, clock: Callable[[], float]) -> Row:
    x, importance = samples()
    row = Row(tensor_type.name, 8 * tensor_type.row_bytes(COLUMNS) / COLUMNS)
    with_type = {name: library for name, library in libraries.items() if library.has(tensor_type)}
    other = _gguf_type(tensor_type)
    for task, weights in (("plain", None), ("importance", importance)):
        if not _can(encode, x[: tensor_type.rows], tensor_type.name, weights):
            continue
        runs = {OURS: lambda weights=weights: encode(x, tensor_type.name, weights)}
        for name, library in with_type.items():
            if library.encodes(tensor_type, weights):
                runs[name] = lambda weights=weights, library=library: library.encode(x, tensor_type, weights)
        if weights is None and other is not None and _can(quantize, x, other):
            runs[GGUF] = lambda: quantize(x, other)
        row.speed[task], results = race(runs, repeat, clock)
        v = np.float64(1) if weights is None else weights.astype(np.float64)
        row.error[task] = {
            name: float(
                (v * (decode(result.view(np.uint8).reshape(ROWS, -1), tensor_type.name, COLUMNS) - x) ** 2).sum()
                / (v * x**2.0).sum()
            )
            for name, result in results.items()
        }
    q = encode(x, tensor_type.name, importance)
    runs = {OURS: lambda: decode(q, tensor_type.name, COLUMNS)}
    for name, library in with_type.items():
        if library.decodes(tensor_type):
            runs[name] = lambda library=library: library.decode(q, tensor_type, COLUMNS)
    if other is not None and _can(dequantize, q, other):
        runs[GGUF] = lambda: dequantize(q, other)
    row.speed["decode"], _ = race(runs, repeat, clock)
    return row


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _columns(row: Row) -> list[str]:
    cells = [row.type, f"{row.bits:.2f}"]
    for task in TASKS:
        speed = row.speed.get(task, {}).get(OURS)
        cells.append(_cell(speed and speed.best, ".1f"))
        cells.append(_cell(row.ratio(task, REFERENCE), ".2f"))
        cells.append(_cell(row.ratio(task, MAINLINE), ".2f"))
        if task != "importance":
            cells.append(_cell(row.ratio(task, GGUF), ".1f"))
    cells += [_cell(row.error_ratio(task, REFERENCE), ".4f") for task in ("importance", "plain")]
    cells.append(_cell(row.error_ratio("plain", GGUF), ".4f"))
    cells.append(f"{max(s.spread for speeds in row.speed.values() for s in speeds.values()):.0%}")
    return cells


HEAD = (
    "type",
    "bits",
    "enc im",
    "x ref",
    "x main",
    "enc",
    "x ref",
    "x main",
    "x gguf",
    "dec",
    "x ref",
    "x main",
    "x gguf",
    "err im",
    "err",
    "/gguf",
    "spread",
)


def show(rows: Sequence[Row]) -> None:
    """The table, with geometric means of the ratios below it."""
    table = [list(HEAD), *map(_columns, rows)]
    widths = [max(len(line[i]) for line in table) for i in range(len(HEAD))]
    for line in table:
        click.echo(
            "  ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        )
    for what, mean in means(rows).items():
        click.echo(f"geometric mean of {what}: {mean:.3f}")


def means(rows: Sequence[Row]) -> dict[str, float]:
    out = {}
    for other in (REFERENCE, MAINLINE, GGUF):
        for task, words in TASKS.items():
            for what, ratio in ((f"speed, {words}", Row.ratio), (f"error, {words}", Row.error_ratio)):
                ratios = [value for row in rows if (value := ratio(row, task, other))]
                if ratios:
                    out[f"{what}, against {other} ({len(ratios)} types)"] = geometric_mean(ratios)
    return out


def report(rows: Sequence[Row], repeat: int, clock: Callable[[], float]) -> dict:
    return {
        "machine": {"cpu": processor_name(), "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None, "threads": 1},
        "versions": {name: version(name) for name in ("ggufmill", "numpy", "numba", "gguf")},
        "data": f"{ROWS} rows x {COLUMNS}, Student-t(5) * 0.02; importance chi2(2) + 0.01",
        "repeat": repeat,
        "clock": clock.__name__,
        "means": means(rows),
        "rows": [asdict(row) for row in rows],
    }


@styled
def plot(rows: Sequence[Row], path: Path) -> None:
    """Speed of encoding per type, and error against size: a ring around a dot where both encoders have the same error."""
    rows = sorted((r for r in rows if "importance" in r.speed), key=lambda r: r.bits)
    figure, (speeds, errors) = new_axes(1, 2, 14, max(6, 0.3 * len(rows) + 1.5))
    names = [n for n in (OURS, REFERENCE) if any(n in r.speed["importance"] for r in rows)]
    for shift, name in enumerate(names):
        measured = [(i, r) for i, r in enumerate(rows) if name in r.speed["importance"]]
        positions = [i + 0.4 * (shift - (len(names) - 1) / 2) for i, _ in measured]
        best = np.array([r.speed["importance"][name].best for _, r in measured])
        slower = best - best / (1 + np.array([r.speed["importance"][name].spread for _, r in measured]))  # the median run
        bars = {"xerr": [slower, 0 * slower], "error_kw": {"ecolor": INK, "elinewidth": 0.8}}
        speeds.barh(positions, best, 0.4, label=name, color=COLOURS[shift], **bars)
        roots = [r.error["importance"][name] ** 0.5 for _, r in measured]
        look = {"s": 14, "color": COLOURS[0]} if name == OURS else {"s": 60, "facecolors": "none", "edgecolors": COLOURS[shift]}
        errors.scatter([r.bits for _, r in measured], roots, label=name, **look)
    speeds.set(xscale="log", xlabel="encoding with importance, million elements per second, one thread", ylim=(len(rows), -1))
    speeds.set_yticks(range(len(rows)), [r.type for r in rows])
    speeds.grid(axis="y", visible=False)
    errors.set(yscale="log", xlabel="bits per weight", ylabel="relative error (weighted root mean square)")
    for axes in (speeds, errors):
        axes.legend()
    figure.draw_without_rendering()
    heights = [[error**0.5 for error in r.error["importance"].values()] for r in rows]
    lines = [[(r.bits, min(both)), (r.bits, max(both))] for r, both in zip(rows, heights, strict=True)]
    place_labels(errors, [(r.bits, r.error["importance"][OURS] ** 0.5, r.type, INK) for r in rows], lines)
    save_figure(figure, path)


def _llama_cpp() -> Path | None:
    """The library inside llama-cpp-python, if that is installed."""
    spec = find_spec("llama_cpp")
    paths = sorted(Path(spec.origin).parent.glob("lib/libggml-base.so*")) if spec is not None and spec.origin else []
    return paths[0] if paths else None


def _default_types() -> list[str]:
    return [t.name for t in TYPES.values() if t.base is None and not t.is_float and can_encode(t)]


@click.command(help=__doc__)
@click.option("--types", help="Comma-separated; default: all plain types that can be encoded.")
@click.option("--repeat", default=5, show_default=True, type=click.IntRange(1), help="Runs of each contender.")
@click.option("--processor-time", is_flag=True, help="Count the thread's time, where the machine does other work.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
@click.option(
    "--plot", "plot_file", type=click.Path(path_type=Path), help="Draw speeds and errors to this file (needs matplotlib)."
)
def main(types: str | None, repeat: int, processor_time: bool, json_file: Path | None, plot_file: Path | None) -> None:
    clock = time.thread_time if processor_time else time.perf_counter
    libraries: dict[str, Library] = {}
    if path := os.environ.get("GGML_LIBRARY"):
        libraries[REFERENCE] = Library(Path(path))
    if mainline := _llama_cpp():
        libraries[MAINLINE] = Mainline(mainline)
    names = types.split(",") if types else _default_types()
    unknown = [name for name in names if name not in TYPES or not can_encode(TYPES[name])]
    if unknown:
        raise click.UsageError(f"no codec for {', '.join(unknown)}")
    rows = []
    for name in names:
        click.echo(f"{name} ...", err=True)
        rows.append(measure(TYPES[name], libraries, repeat, clock))
    show(rows)
    if json_file:
        json_file.write_text(json.dumps(report(rows, repeat, clock), indent=1) + "\n")
    if plot_file:
        plot(rows, plot_file)


if __name__ == "__main__":
    main()
