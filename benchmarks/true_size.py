"""Seconds and memory of whole jobs on slices of published models (see slices.py), beside what `--dry-run` says of them.

\b
    python benchmarks/true_size.py WORK_FOLDER --model DeepSeek-V3 --json out/true_size.json
    python benchmarks/true_size.py WORK_FOLDER --model DeepSeek-V3 --set n_routed_experts=16 --only covariance
    python benchmarks/true_size.py WORK_FOLDER --model DeepSeek-V3 --json out/true_size.json --page docs/true-size.md

Every job is a process of its own. Seconds: of the clock and of the processor. Memory is the largest that was no file's
(RssAnon and RssShmem), looked at each two milliseconds. Predicted are seconds of the processor, and memory; a job that is a
sixth away from them runs once more. The folder is emptied at the end.
--page writes the table of all models in the file of --json between two marks of the page.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click
from slices import SLICES, write_slice

from ggufmill.operating_system.processors import processor_name

MILL = [sys.executable, "-m", "ggufmill"]
RECIPE = """token_embd\\.weight=q8_0
output\\.weight=q6_K
ffn_down_exps=iq4_k
ffn_(gate|up)_exps=iq3_k
ffn_down=iq5_k
.*=q6_K
"""
MAY = ["--allow-requantize"]  # of mxfp4
_BEGIN, _END = "<!-- begin: benchmarks/true_size.py -->", "<!-- end: benchmarks/true_size.py -->"
_SAID = "predicted_seconds", "predicted_memory"
_EVERY = 0.002  # seconds between two looks at the memory
_APART = 0.15  # of what was said: a job that is further from it runs twice


@dataclass(frozen=True)
class Figures:
    """Of a job: seconds (of the clock: None where they were not kept), bytes; predicted: what --dry-run said (seconds of the
    processor), None where it says nothing; machine: what processor it ran on; again: those of a second run."""

    job: str
    wall: float | None
    processor: float
    memory: int
    predicted_seconds: float | None = None
    predicted_memory: int | None = None
    code: int = 0
    machine: str = ""
    again: float | None = None


def measured(command: list[str], log: Path | None = None) -> tuple[float, float, int, int]:
    """(seconds, seconds of the processor, largest anonymous memory in bytes, exit code)"""
    began, peak = time.perf_counter(), 0
    with (log or Path(os.devnull)).open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out)
        while True:
            pid, status, usage = os.wait4(process.pid, os.WNOHANG)
            if pid:
                break
            peak = max(peak, _anonymous(process.pid))
            time.sleep(_EVERY)
    process.returncode = os.waitstatus_to_exitcode(status)
    return time.perf_counter() - began, usage.ru_utime + usage.ru_stime, peak, process.returncode


def _anonymous(pid: int) -> int:
    try:
        kibibytes = re.findall(r"Rss(?:Anon|Shmem):\s+(\d+)", Path(f"/proc/{pid}/status").read_text("utf-8"))
    except OSError:
        return 0
    return sum(map(int, kibibytes)) << 10


def predicted(command: list[str]) -> tuple[float | None, int | None]:
    """(seconds of the processor, bytes of memory) that --dry-run says."""
    done = subprocess.run([*command, "--dry-run", "--json"], capture_output=True, text=True)
    if done.returncode:
        return None, None
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures.get("predicted", {}).get("processor_seconds"), figures.get("memory", {}).get("peak")


def jobs(
    folder: Path, windows: int, lean: bool = False, memory: str | None = None
) -> dict[str, tuple[list[str], bool, list[str]]]:
    """Name -> (command, whether it takes --dry-run, outputs to remove afterwards), in an order in which inputs are there.
    lean: what is quantised to the mixed recipe runs, and the larger file of q8_0 does not stay. memory: a budget."""
    at = {
        n: str(folder / n)
        for n in (
            "model",
            "q8.gguf",
            "mix.gguf",
            "mix.txt",
            "m.imatrix",
            "c.imatrix",
            "c.cov",
            "d.cov",
            "v.gguf",
            "s.txt",
            "c.curv",
        )
    }
    runs = at["mix.gguf" if lean else "q8.gguf"]
    text, source = str(folder / "model" / "calibration.txt"), at["model"]
    run = ["-f", text, "-c", "512", "--chunks", str(windows)]
    budget = [] if memory is None else ["--memory", memory]
    covariance = ["--imatrix", at["c.imatrix"], "--covariance", at["c.cov"], *budget]
    curvature = ["--imatrix", at["c.imatrix"], "--curvature", at["c.curv"], *budget]
    dense = ["--custom-q", "ffn_(gate|up|down)_exps=bf16,token_embd=bf16,^output\\.=bf16"]
    return {
        "inspect": ([*MILL, "inspect", source], False, []),
        "convert --outtype q8_0": ([*MILL, "convert", source, at["q8.gguf"], "--outtype", "q8_0"], True, ["q8.gguf"] * lean),
        "quantize to a mixed recipe, --manifest": (
            [
                *MILL,
                "quantize",
                source,
                at["mix.gguf"],
                "--recipe",
                at["mix.txt"],
                "--ignore-imatrix-rules",
                "--manifest",
                *MAY,
            ],
            True,
            ["mix.gguf.manifest"] + ["mix.gguf"] * (not lean),
        ),
        "perplexity": ([*MILL, "perplexity", runs, *run], True, []),
        "imatrix": ([*MILL, "imatrix", "-m", runs, *run, "-o", at["m.imatrix"]], True, ["m.imatrix"]),
        "imatrix --covariance": (
            [*MILL, "imatrix", "-m", runs, *run, "-o", *covariance[1:]],
            True,
            [],
        ),
        "imatrix show": ([*MILL, "imatrix", "show", at["c.cov"]], False, []),
        "imatrix merge": ([*MILL, "imatrix", "merge", at["c.cov"], at["c.cov"], "-o", at["d.cov"]], False, ["d.cov"]),
        "quantize --covariance, but for experts": (
            [*MILL, "quantize", source, at["v.gguf"], "iq3_k", *dense, *covariance, *MAY],
            True,
            ["v.gguf"],
        ),
        "search --covariance": (
            [*MILL, "search", source, "-o", at["s.txt"], "--target-bpw", "4", *covariance, "--types", "iq2_k,iq3_k,iq4_k,q6_K"],
            True,
            ["s.txt"],
        ),
        "imatrix --curvature": (
            [*MILL, "imatrix", "-m", runs, *run, "-o", *curvature[1:]],
            True,
            [],
        ),
        "quantize --curvature, but for experts": (
            [*MILL, "quantize", source, at["v.gguf"], "iq3_k", *dense, *curvature, *MAY],
            True,
            ["v.gguf"],
        ),
        "generate": ([*MILL, "generate", runs, "-p", "One", "-n", "32", "--ignore-eos", "--temp", "0"], False, []),
    }


def page_table(figures: dict[str, dict[str, Any]]) -> str:
    """Markdown of all models: name -> what was changed of it, and jobs."""
    lines = ["| slice | job | processor, s | said | memory, MiB | said | on |", "|---|---|--:|--:|--:|--:|---|"]
    for model, found in figures.items():
        rows = [Figures(**row) for row in found["jobs"].values() if not row["code"]]
        cells = (line.split("|") for line in table(rows).splitlines()[2:])
        for row, (job, _, *rest) in zip(rows, (line[1:-1] for line in cells), strict=True):
            lines.append("|".join(["", f" {model} ", job, *rest, f" {row.machine} ", ""]))
            model = ""
    return "\n".join(lines)


def write_page(page: Path, figures: dict[str, dict[str, Any]]) -> None:
    """Replaces what is between the marks."""
    before, rest = page.read_text("utf-8").split(_BEGIN, 1)
    page.write_text(f"{before}{_BEGIN}\n{page_table(figures)}\n{_END}{rest.split(_END, 1)[1]}", "utf-8")


def table(rows: list[Figures]) -> str:
    """Markdown."""
    lines = ["| job | seconds | of the processor | predicted | memory, MiB | predicted |", "|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        seconds = "" if row.predicted_seconds is None else f"{row.predicted_seconds:.0f}"
        memory = "" if row.predicted_memory is None else f"{row.predicted_memory >> 20:,}"
        wall = "" if row.wall is None else f"{row.wall:.0f}"
        failed = f" (exit code {row.code})" if row.code else ""
        taken = ", ".join(f"{one:.1f}" for one in (row.processor, row.again) if one is not None)
        lines.append(f"| {row.job}{failed} | {wall} | {taken} | {seconds} | {row.memory >> 20:,} | {memory} |")
    return "\n".join(lines)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", type=click.Choice(list(SLICES)), required=True)
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the config, for example n_routed_experts=32."
)
@click.option(
    "--only",
    multiple=True,
    help="Only jobs with a match of this regex in their name; those whose outputs they read have to be there.",
)
@click.option("--windows", default=4, show_default=True, help="Of 512 tokens.")
@click.option("--memory", metavar="SIZE", help="Of what has a budget.")
@click.option("--machine", default=processor_name, help="What the processor is called. [default: what the system says]")
@click.option(
    "--lean", is_flag=True, help="Run the file of the mixed recipe, so that the one of q8_0 need not stay on the disk."
)
@click.option("--keep", is_flag=True, help="Leave the model and what later jobs read.")
@click.option("--page", type=click.Path(exists=True, path_type=Path), help="Write the table of all figures into this page.")
@click.option(
    "--said-again", is_flag=True, help="Measure nothing: ask --dry-run again, which needs no more than the headers of files."
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Add the figures to this file.")
def main(
    folder: Path,
    model: str,
    changes: tuple[str, ...],
    only: tuple[str, ...],
    windows: int,
    memory: str | None,
    machine: str,
    lean: bool,
    keep: bool,
    page: Path | None,
    said_again: bool,
    json_file: Path | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mix.txt").write_text(RECIPE)
    if not (folder / "model").exists():
        values = {key: json.loads(value) for key, _, value in (change.partition("=") for change in changes)}
        print(f"{model}: {write_slice(folder / 'model', model, changes=values):,} bytes", flush=True)
    all_figures = json.loads(json_file.read_text()) if json_file is not None and json_file.exists() else {}
    known = all_figures.setdefault(model, {"changes": list(changes), "jobs": {}})["jobs"]
    rows, log = [], folder / "log.txt"
    for name, (command, has_forecast, outputs) in jobs(folder, windows, lean, memory).items():
        if only and not any(re.search(part, name) for part in only):
            continue
        said = predicted(command) if has_forecast else (None, None)
        if said_again:
            rows += [Figures(**known[name] | dict(zip(_SAID, said, strict=True)))] if name in known else []
            continue
        replaces = has_forecast and "perplexity" not in command
        whole = [*command, "--force"] if replaces else command
        wall, processor, peak, code = measured(whole, log)
        is_apart = not code and said[0] is not None and abs(said[0] / processor - 1) > _APART
        again = measured(whole, log)[1] if is_apart else None
        rows.append(Figures(name, wall, processor, peak, *said, code, machine, again))
        print(table(rows[-1:]).splitlines()[-1], flush=True)
        for output in outputs:
            (folder / output).unlink(missing_ok=True)
    print(f"\n{model}, {', '.join(changes) or 'all experts'}\n\n{table(rows)}")
    known |= {row.job: asdict(row) for row in rows}
    if json_file is not None:
        json_file.write_text(json.dumps(all_figures, indent=1) + "\n")
    if page is not None:
        write_page(page, all_figures)
    if not keep:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
