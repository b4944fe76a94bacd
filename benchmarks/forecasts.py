"""What jobs on the demo take, in seconds of the processor and memory, beside what their `--dry-run` says.

\b
    python benchmarks/forecasts.py WORK_FOLDER
    python benchmarks/forecasts.py WORK_FOLDER --only sequential --only "make" --gaps

Every job is a process of its own, as in true_size.py. --gaps: the longest time between two reports of progress, and before the
first one, of the job itself (seconds of the processor). While a kernel is compiled each second has a report, too.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import click
from true_size import MILL, measured, predicted

from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
_WATCHED = """
import sys, time, atexit
from ggufmill.pipeline.common import progress
from ggufmill.simd.compile import compile_time
made, times = progress.Progress, []
def report(*a, **k):
    times.append((time.process_time(), k.get("stage") or a[0], k.get("item", "")))
    return made(*a, **k)
progress.Progress = report
def reported(function, stage):
    def called(*a):
        if a or compile_time._thread.compiles:  # else a kernel was loaded
            times.append((time.process_time(), stage, a[0] if a else ""))
        return function(*a)
    return called
compile_time._say = reported(compile_time._say, "compiling")
compile_time._end = reported(compile_time._end, "compiled")
@atexit.register
def say():
    ends = [*times, (time.process_time(), "end", "")]
    gaps = sorted(((b[0] - a[0], a[1], a[2], b[1]) for a, b in zip(ends, ends[1:])), reverse=True)[:4]
    first, stages = ends[0][0], {}
    for a, b in zip(ends, ends[1:]):
        stages[a[1]] = stages.get(a[1], 0.0) + b[0] - a[0]
    print(f"first report after {first:.1f}, longest: " + "; ".join(f"{g:.1f} {s} {i} -> {n}" for g, s, i, n in gaps)
        + "; stages: " + ", ".join(f"{s} {t:.1f}" for s, t in stages.items()), file=sys.stderr)
from ggufmill.cli.program import run
"""


def jobs(folder: Path) -> dict[str, tuple[list[str], list[str]]]:
    """Name -> (arguments, outputs to remove afterwards), in an order in which inputs are there."""
    at = {
        name: str(folder / name) for name in ("bf16.gguf", "q.gguf", "m.imatrix", "c.imatrix", "c.cov", "g.imatrix", "g.curv")
    }
    demo, text, held = str(DEMO), str(DEMO / "calibration.txt"), str(DEMO / "heldout.txt")
    bf16, q, out, recipe = at["bf16.gguf"], at["q.gguf"], str(folder / "out"), str(folder / "out.txt")
    order = ["--sequential", text, "--sequential-chunks", "32"]
    data, bits = ["--imatrix", at["m.imatrix"]], ["--target-bpw", "3.5", "--types", "iq2_k,iq3_k,iq4_k"]
    imatrix, read = ["imatrix", "-m", bf16, "-f", text, "-c", "512"], ["-f", held, "-c", "512"]
    cov = ["--imatrix", at["c.imatrix"], "--covariance", at["c.cov"]]
    curv = ["--imatrix", at["g.imatrix"], "--curvature", at["g.curv"]]
    gone = ["out", "out.txt", "out.txt.state.json", "out.recipe.txt"]
    search = ["search", bf16, recipe, *bits]
    return {
        "convert --outtype bf16": (["convert", demo, bf16, "--outtype", "bf16"], []),
        "imatrix": ([*imatrix, "-o", at["m.imatrix"]], []),
        "imatrix --covariance": ([*imatrix, "-o", *cov[1:]], []),
        "imatrix --curvature": ([*imatrix, "--chunks", "32", "-o", *curv[1:]], []),
        "quantize iq3_k": (["quantize", bf16, q, "iq3_k", "--imatrix", at["m.imatrix"]], []),
        "quantize --covariance": (["quantize", bf16, out, "iq3_k", *cov], gone),
        "quantize --curvature": (["quantize", bf16, out, "iq3_k", *curv], gone),
        "quantize --covariance --sequential": (["quantize", bf16, out, "iq3_k", *cov, *order], gone),
        "quantize --curvature --effort 4": (["quantize", bf16, out, "iq3_k", *curv, "--effort", "4", *order], gone),
        "quantize --target-bpw --calibration": (["quantize", bf16, out, *bits, "--calibration", text, *data], gone),
        "perplexity": (["perplexity", bf16, *read], []),
        "compare": (["compare", bf16, q, *read], []),
        "evaluate": (["evaluate", q, "--against", bf16, *read, "-o", out, "--no-plot"], gone),
        "tune": (["tune", bf16, q, out, "-f", text, "--chunks", "24"], gone),
        "search": ([*search, *data, "-f", text], gone),
        "search --refine 1": ([*search, *data, "-f", text, "--chunks", "4", "--measurements", "2", "--refine", "1"], gone),
        "search --covariance": ([*search, *cov, "-f", text, "--chunks", "4"], gone),
        "search --curvature": ([*search, *curv], gone),
        "repack": (["repack", q, out], gone),
        "run": (["run", "demo", "-o", out], gone),
        "make": (["make", demo, "-o", out, "--fit", "5M"], gone),
        "make --effort 3": (["make", demo, "-o", out, "--fit", "5M", "--effort", "3"], gone),
        "make --effort 4": (["make", demo, "-o", out, "--fit", "5M", "--effort", "4"], gone),
    }  # fmt: skip


def _remove(path: Path) -> None:
    if path.is_dir():
        for each in path.iterdir():
            _remove(each)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--only", multiple=True, help="Only jobs with a match of this regex in their name; their inputs have to be there."
)
@click.option("--said-only", is_flag=True, help="Run nothing; what was measured is that of --json.")
@click.option("--gaps", is_flag=True, help="Say how long progress stands still instead of what is predicted.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Add the figures to this file.")
def main(folder: Path, only: tuple[str, ...], said_only: bool, gaps: bool, json_file: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    figures = json.loads(json_file.read_text()) if json_file is not None and json_file.exists() else {}
    for name, (arguments, outputs) in jobs(folder).items():
        if only and not any(re.search(part, name) for part in only):
            continue
        for output in outputs:
            _remove(folder / output)
        forces = ["--force"] if arguments[0] not in ("perplexity", "compare", "evaluate") else []
        if gaps:
            command = [sys.executable, "-c", f"{_WATCHED}\nrun()", *arguments, *forces]
            done = subprocess.run(command, capture_output=True, text=True)
            last = (done.stderr.strip().splitlines() or [""])[-1]
            print(f"{name}: {last}" + (f" (exit code {done.returncode})" if done.returncode else ""), flush=True)
            continue
        before = figures.get(name, {})
        said, memory = predicted([*MILL, *arguments, *forces])
        processor, peak = before.get("processor", 0.0), before.get("memory", 0)
        if not said_only:
            _, processor, peak, code = measured([*MILL, *arguments, *forces], folder / "log.txt")
            name = f"{name} (exit code {code})" if code else name
        figures[name] = {"processor": processor, "said": said, "memory": peak, "said_memory": memory}
        cells = [
            f"{processor:.1f}",
            "" if said is None else f"{said:.1f}",
            f"{peak >> 20}",
            "" if memory is None else f"{memory >> 20}",
        ]
        off = "" if said is None else f"{100 * (said / processor - 1):+.0f} %"
        off_memory = "" if memory is None else f"{100 * (memory / peak - 1):+.0f} %"
        print(f"| {name} | {' | '.join(cells)} | {off} | {off_memory} |", flush=True)
        if json_file is not None:
            json_file.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
