"""What a cluster costs beside the work: seconds per piece, bytes per second, the scheduler's memory; a job and its simulation.

\\b
    python benchmarks/cluster.py WORK_FOLDER --json benchmarks/results/cluster.json

Everything runs on this machine: more worker processes than it has processors share these. The job quantises a model of random
weights, which is written to WORK_FOLDER. Figures are of one run each, but for the job, whose best of --repeat counts; `load` is
the machine's at the start.
"""

from __future__ import annotations

import json
import operator
import os
import pickle
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import click
import numpy as np

from ggufmill import plan_memory, quantize_model
from ggufmill.formats import TYPES
from ggufmill.jobs.execute import execute
from ggufmill.jobs.plan import Output, make_plan
from ggufmill.operating_system.processors import available_cpus
from ggufmill.pipeline.cluster.connection import open_cluster
from ggufmill.pipeline.cluster.forecast import forecast_cluster
from ggufmill.pipeline.cluster.ordered_map import map_ordered
from ggufmill.pipeline.cluster.pieces import cut, piece_weights
from ggufmill.quantize.timing import encode_speed

PIECES, TASKS, IN_TURN = 1000, 100_000, 5000
BLOCK = 16 << 20  # bytes of a result
TENSORS, ROWS, COLUMNS = 12, 4096, 4096
TYPE = "iq4_k"


def per_piece(workers: int) -> dict[str, float]:
    """Seconds per piece that does nothing, and bytes per second of results."""
    with open_cluster(f"local:{workers}") as cluster:
        list(map_ordered(cluster, operator.neg, range(100)))
        began = time.perf_counter()
        list(map_ordered(cluster, operator.neg, range(PIECES)))
        seconds = (time.perf_counter() - began) / PIECES
        sizes = [BLOCK // 8] * 64
        began = time.perf_counter()
        for done in map_ordered(cluster, np.ones, sizes):
            assert done.value.nbytes == BLOCK
        return {"piece_seconds": seconds, "bytes_per_second": len(sizes) * BLOCK / (time.perf_counter() - began)}


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def scheduler_memory() -> dict[str, int]:
    """Bytes of a scheduler that has nothing to do, with TASKS tasks at once, and after these are gone; and the most that it has
    while IN_TURN pieces go through `map_ordered`, which has a few in flight."""
    from distributed import Client

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "scheduler.json"
        command = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--scheduler-file", str(file), "--port", "0"]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        scheduler = subprocess.Popen([*command, "--no-dashboard"], **quiet)
        workers = []
        try:
            while not file.exists():
                time.sleep(0.2)
            with Client(scheduler_file=str(file), set_as_default=False) as client:
                idle = resident(scheduler.pid)
                futures = client.map(operator.neg, range(TASKS), pure=False)
                while client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks)) < TASKS:
                    time.sleep(0.5)
                all_at_once = resident(scheduler.pid)
                del futures
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1"]
            workers = [subprocess.Popen([*worker, "--no-dashboard"], **quiet) for _ in range(2)]
            with open_cluster(str(file)) as cluster:
                before = resident(scheduler.pid)
                largest = before
                for number, _ in enumerate(map_ordered(cluster, operator.neg, range(IN_TURN))):
                    if number % 1000 == 0:
                        largest = max(largest, resident(scheduler.pid))
            return {"idle": idle, "all_at_once": all_at_once, "before": before, "one_after_the_other": largest}
        finally:
            for process in [*workers, scheduler]:
                process.terminate()
                process.wait()


def random_model(folder: Path) -> Path:
    path = folder / "random-f16.gguf"
    if not path.exists():

        def rows(number: int):
            def produce(start: int, stop: int) -> np.ndarray:
                rng = np.random.default_rng([number, start])
                x = rng.standard_normal((stop - start, COLUMNS), np.float32) * np.float32(0.02)
                return x.astype(np.float16).view(np.uint8)

            return produce

        outputs = [
            Output(f"blk.{i}.ffn_down.weight", (COLUMNS, ROWS), "f16", TYPES["f16"], "", rows(i)) for i in range(TENSORS)
        ]
        execute(make_plan(outputs, {"general.architecture": "llama", "llama.block_count": np.uint32(TENSORS)}, path))
    return path


def disk_rate(folder: Path, nbytes: int = 1 << 30) -> dict[str, float]:
    """Bytes per second of writing a file and bringing it to disk, and of reading it past the page cache."""
    path, block = folder / "disk", np.random.default_rng(0).integers(0, 255, 1 << 24, np.uint8).tobytes()
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written = nbytes / (time.perf_counter() - began)
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(len(block)):
            pass
    read = nbytes / (time.perf_counter() - began)
    path.unlink()
    return {"write": written, "read": read}


def job(
    model: Path, workers: int, output: str, repeat: int, measured: dict[str, float], disk: dict[str, float]
) -> dict[str, float]:
    """Seconds of a job on worker processes, their start included, and what the simulation says."""
    out = model.with_name("out.gguf")
    seconds = []
    for _ in range(repeat):
        began = time.perf_counter()
        quantize_model(model, out, TYPE, pure=True, force=True, cluster=f"local:{workers}", cluster_output=output)
        seconds.append(time.perf_counter() - began)
    began = time.perf_counter()
    with open_cluster(f"local:{workers}") as cluster:
        list(map_ordered(cluster, operator.neg, range(2 * workers)))
    start = time.perf_counter() - began
    plan = quantize_model(model, out, TYPE, pure=True, dry_run=True, no_timing=True).plan
    assert plan is not None
    [row] = forecast_cluster(
        plan,
        [workers],
        threads=1,
        output=output,
        read_rate=disk["read"],
        write_rate=disk["write"],
        network_rate=disk["read"],
        relay_rate=measured["bytes_per_second"],
        encode_rate=encode_speed(TYPES[TYPE], workers) / workers,
        piece_seconds=measured["piece_seconds"],
        start_seconds=start,
    ).rows
    pending = list(zip(plan.outputs, plan.locations, strict=True))
    pieces = list(cut(pending, piece_weights(pending, workers)))
    sent = sum(len(pickle.dumps(one)) for one in pieces) / len(pieces)
    out.unlink()
    return {
        "workers": workers,
        "pieces": row.pieces,
        "piece_message_bytes": sent,
        "seconds": min(seconds),
        "start_seconds": start,
        "simulated": row.simulated,
        "estimated": row.estimated,
    }


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--workers", default=4, show_default=True, help="Worker processes at most.")
@click.option("--repeat", default=1, show_default=True)
@click.option("--checkpoint", type=click.Path(exists=True, path_type=Path), help="Also forecast this model, by --recipe.")
@click.option("--recipe", default="deepseek-v3-iq4_k_r4", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(folder: Path, workers: int, repeat: int, checkpoint: Path | None, recipe: str, json_file: Path | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"processors": available_cpus(), "load": os.getloadavg()[0], "disk": disk_rate(folder)}
    results["pieces"] = {n: per_piece(n) for n in range(1, workers + 1)}
    click.echo(json.dumps(results, indent=1))
    results["scheduler_memory"] = scheduler_memory()
    click.echo(json.dumps(results["scheduler_memory"]))
    model = random_model(folder)
    results["jobs"] = {
        output: [job(model, n, output, repeat, results["pieces"][n], results["disk"]) for n in range(1, workers + 1)]
        for output in ("shared", "collect")
    }
    click.echo(json.dumps(results["jobs"], indent=1))
    if checkpoint is not None:
        counts = (1, 2, 4, 8, 16, 32, 64)
        forecast = plan_memory(checkpoint, recipe=recipe, cluster=counts, cluster_threads=32).cluster
        assert forecast is not None
        results["forecast"] = forecast.as_json()
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
