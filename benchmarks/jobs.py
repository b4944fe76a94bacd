"""Complete jobs on one model, alternately: our quantize against llama-quantize, our repack against cp.

\\b
    python benchmarks/jobs.py MODEL WORK_FOLDER --llama-quantize path/to/llama-quantize --threads 2

MODEL is a GGUF in bf16, or a Hugging Face folder, which is converted to it first. Every command is timed from start to end, the
program's start included; output files are removed in between and the disk is synced. Figures are seconds: the best of --repeat,
and the median.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

import click

MILL = [sys.executable, "-m", "ggufmill"]


def timed(command: list[str], output: Path) -> float:
    """Seconds that the command takes to make the output and bring it to disk."""
    output.unlink(missing_ok=True)
    os.sync()
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    os.sync()
    return time.perf_counter() - began


def race(commands: dict[str, tuple[list[str], Path]], repeat: int) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(repeat):
        for name, (command, output) in commands.items():
            times[name].append(timed(command, output))
    return times


@click.command(help=__doc__)
@click.argument("model", type=click.Path(exists=True, path_type=Path))
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--llama-quantize", "rival", type=click.Path(exists=True, dir_okay=False), help="The C++ quantiser.")
@click.option("--types", default="q8_0,q4_K,q6_K,iq4_k,iq4_ks,iq2_k", show_default=True)
@click.option("-t", "--threads", default=2, show_default=True)
@click.option("--repeat", default=2, show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(model: Path, folder: Path, rival: str | None, types: str, threads: int, repeat: int, json_file: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    names = {n: folder / f"{n}.gguf" for n in ("bf16", "ours", "theirs", "one", "copy", "packed")}
    t = str(threads)
    results: dict[str, dict[str, list[float]]] = {}
    if model.is_dir():
        subprocess.run([*MILL, "convert", str(model), str(names["bf16"]), "--outtype", "bf16", "-t", t], check=True)
    else:
        names["bf16"] = model
    for type_name in types.split(","):
        commands = {
            "ours": ([*MILL, "quantize", str(names["bf16"]), str(names["ours"]), type_name, "--pure", "-t", t], names["ours"])
        }
        if threads > 1:
            single = [*MILL, "quantize", str(names["bf16"]), str(names["one"]), type_name, "--pure", "-t", "1"]
            commands["ours, 1 thread"] = (single, names["one"])
        if rival:
            other = [rival, "--pure", str(names["bf16"]), str(names["theirs"]), type_name.upper(), t]
            commands["llama-quantize"] = (other, names["theirs"])
        results[f"quantize to {type_name}"] = race(commands, repeat)
        if type_name == "iq4_k":
            repack = [*MILL, "repack", str(names["ours"]), str(names["packed"]), "-t", t]
            copy = ["cp", str(names["ours"]), str(names["copy"])]
            results["repack to iq4_k_r4"] = race({"repack": (repack, names["packed"]), "cp": (copy, names["copy"])}, repeat)
    for job, times in results.items():
        cells = [f"{name} {min(t):.1f} s (median {median(t):.1f})" for name, t in times.items()]
        click.echo(f"{job}: " + ", ".join(cells))
    if json_file:
        json_file.write_text(json.dumps({"threads": threads, "seconds": results}, indent=1) + "\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
