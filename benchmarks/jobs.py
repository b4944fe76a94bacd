"""Whole jobs beside others, in turns: `quantize` beside llama-quantize, `repack`, `split` and `merge`
beside cp, `imatrix` beside `perplexity`.

\b
    python benchmarks/slices.py out/slice --model Llama-3.1-8B --set hidden_size=2048 \\
        --set intermediate_size=8192 --set num_hidden_layers=4 --set vocab_size=8192
    python benchmarks/jobs.py out/slice WORK_FOLDER --rival path/to/llama-quantize --json benchmarks/results/jobs.json

MODEL is a Hugging Face folder with a calibration.txt, which is converted to bf16 first. Every command is a process from start
to end; figures are seconds of the processor, and of the clock until all is on the disk: ours before and after the other, so
that what else runs is seen. Ratios are of the processor's.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import click
from true_size import MILL

from ggufmill.operating_system.processors import processor_name


def timed(command: list[str], outputs: list[Path]) -> tuple[float, float]:
    """Seconds of the processor, and of the clock, that the command takes to make the outputs and bring them to disk."""
    for output in outputs:
        output.unlink(missing_ok=True)
    os.sync()
    began = time.perf_counter()
    # Python's modules are compiled once, as in every installation.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"exit code {process.returncode}: {' '.join(command)}")
    os.sync()
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - began


def race(ours: list[str], theirs: list[str] | None, outputs: list[Path], others: list[Path]) -> dict[str, Any]:
    """Ours, the other, and ours again."""
    first = timed(ours, outputs)
    other = timed(theirs, others) if theirs is not None else None
    again = timed(ours, outputs)
    figures: dict[str, Any] = {"ours": [first[0], again[0]], "ours, clock": [first[1], again[1]]}
    if other is not None:
        figures |= {"theirs": other[0], "theirs, clock": other[1], "ratio": 2 * other[0] / (first[0] + again[0])}
    return figures


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rival", type=click.Path(exists=True, dir_okay=False), help="The C++ quantiser.")
@click.option("--types", default="q4_K,q6_K,iq4_k,iq2_k,iq3_xxs", show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--windows", default=16, show_default=True, help="Of 512 tokens, of perplexity and imatrix.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Add the figures to this file.")
def main(model: Path, folder: Path, rival: str | None, types: str, threads: int, windows: int, json_file: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    at = {n: folder / f"{n}.gguf" for n in ("bf16", "ours", "theirs", "copy", "packed", "whole", "part")}
    bf16, t = str(at["bf16"]), ["-t", str(threads)]
    subprocess.run([*MILL, "convert", str(model), bf16, "--outtype", "bf16", *t], check=True)
    about = json.loads(json_file.read_text()) if json_file is not None and json_file.exists() else {"jobs": {}}
    about |= {"processor": processor_name(), "threads": threads}

    def run(job: str, ours: list[str], theirs: list[str] | None, outputs: list[Path], others: list[Path]) -> None:
        found = about["jobs"][job] = race([*MILL, *ours, *t], theirs, outputs, others) | {"load": round(os.getloadavg()[0])}
        if json_file:
            json_file.write_text(json.dumps(about, indent=1) + "\n")
        print(f"{job}: " + ", ".join(f"{key} {value}" for key, value in found.items()), flush=True)

    for name in filter(None, types.split(",")):
        other = [rival, "--pure", bf16, str(at["theirs"]), name.upper(), str(threads)] if rival else None
        run(f"quantize to {name}", ["quantize", bf16, str(at["ours"]), name, "--pure"], other, [at["ours"]], [at["theirs"]])
        if name == "iq4_k":
            copy = ["cp", str(at["ours"]), str(at["copy"])]
            run("repack to iq4_k_r4, beside cp", ["repack", *copy[1:2], str(at["packed"])], copy, [at["packed"]], [at["copy"]])
    size = max(1, at["bf16"].stat().st_size // 3)
    copy = ["cp", bf16, str(at["copy"])]
    subprocess.run([*MILL, "split", bf16, str(folder / "part"), "--split-max-size", str(size)], check=True)
    parts = sorted(folder.glob("part*-of-*.gguf"))
    run("split, beside cp", ["split", bf16, str(folder / "part"), "--split-max-size", str(size)], copy, parts, [at["copy"]])
    run("merge, beside cp", ["merge", str(parts[0]), str(at["whole"])], copy, [at["whole"]], [at["copy"]])
    read = [bf16, "-f", str(model / "calibration.txt"), "-c", "512", "--chunks", str(windows), *t]
    text, made = [*MILL, "perplexity", *read], [folder / name for name in ("o.imatrix", "o.cov")]
    collect = ["imatrix", "-m", *read[:-2], "-o", str(made[0])]
    run("imatrix, beside perplexity", collect, text, made[:1], [])
    run("imatrix --covariance, beside perplexity", [*collect, "--covariance", str(made[1])], text, made, [])
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
