"""What a cluster costs beside the work: seconds per piece, bytes per second, the scheduler's memory; a job and its simulation.

\\b
    python benchmarks/cluster.py WORK_FOLDER --json benchmarks/results/cluster.json

Everything runs on this machine: more worker processes than it has processors share these. The job quantises a model of random
weights, which is written to WORK_FOLDER. Everything is measured in --rounds, one after the other through all of it, so
that a busy minute spoils one round of everything and not all rounds of one thing; `min` is what a quiet machine would take, and
where `median` is far from it the machine was busy. `loads` are the machine's before each round. The simulation is given the
smallest times.
"""

from __future__ import annotations

import json
import operator
import os
import pickle
import statistics
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
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.operating_system.processors import available_cpus
from ggufmill.pipeline.cluster.connection import open_cluster
from ggufmill.pipeline.cluster.forecast import forecast_cluster
from ggufmill.pipeline.cluster.ordered_map import map_ordered
from ggufmill.pipeline.cluster.pieces import cut, piece_weights
from ggufmill.quantize.timing import encode_speed

PIECES, TASKS, IN_TURN = 1000, 100_000, 5000
BLOCK, BLOCKS = 16 << 20, 64  # bytes of a result; results
DISK_BYTES = 1 << 30
TENSORS, ROWS, COLUMNS = 12, 4096, 4096
TYPE = "iq4_k"


def per_piece(workers: int, pieces: int) -> dict[str, float]:
    """Seconds of starting the workers, per piece that does nothing, and per byte of results."""
    began = time.perf_counter()
    with open_cluster(f"local:{workers}") as cluster:
        list(map_ordered(cluster, operator.neg, range(100)))
        start, began = time.perf_counter() - began, time.perf_counter()
        list(map_ordered(cluster, operator.neg, range(pieces)))
        seconds = (time.perf_counter() - began) / pieces
        sizes = [BLOCK // 8] * BLOCKS
        began = time.perf_counter()
        for done in map_ordered(cluster, np.ones, sizes):
            assert done.value.nbytes == BLOCK
        per_byte = (time.perf_counter() - began) / (len(sizes) * BLOCK)
        return {"start_seconds": start, "piece_seconds": seconds, "seconds_per_byte": per_byte}


def resident(pid: int) -> int:
    """Bytes of memory that a process has."""
    lines = Path(f"/proc/{pid}/status").read_text("utf-8").splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


def scheduler_memory(tasks: int, in_turn: int) -> dict[str, int]:
    """Bytes of a scheduler that has nothing to do, with so many tasks at once, and after these are gone; and the most that it
    has while `in_turn` pieces go through `map_ordered`, which has a few in flight."""
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
                futures = client.map(operator.neg, range(tasks), pure=False)
                count: Any = 0
                while count < tasks:
                    count = client.run_on_scheduler(lambda dask_scheduler: len(dask_scheduler.tasks))
                    time.sleep(0.5)
                all_at_once = resident(scheduler.pid)
                del futures
            worker = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(file), "--nthreads", "1"]
            workers = [subprocess.Popen([*worker, "--no-dashboard"], **quiet) for _ in range(2)]
            with open_cluster(str(file)) as cluster:
                before = resident(scheduler.pid)
                largest = before
                for number, _ in enumerate(map_ordered(cluster, operator.neg, range(in_turn))):
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


def disk_seconds(folder: Path, nbytes: int) -> dict[str, float]:
    """Seconds per byte of writing a file and bringing it to disk, and of reading it past the page cache."""
    path, block = folder / "disk", np.random.default_rng(0).integers(0, 255, 1 << 24, np.uint8).tobytes()
    began = time.perf_counter()
    with path.open("wb") as file:
        for _ in range(nbytes // len(block)):
            file.write(block)
        file.flush()
        os.fsync(file.fileno())
    written = (time.perf_counter() - began) / nbytes
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
        began = time.perf_counter()
        while file.read(len(block)):
            pass
    read = (time.perf_counter() - began) / nbytes
    path.unlink()
    return {"write": written, "read": read}


def job_seconds(model: Path, workers: int, output: str) -> float:
    """Seconds of a job on worker processes, their start included."""
    out = model.with_name("out.gguf")
    began = time.perf_counter()
    quantize_model(model, out, TYPE, pure=True, force=True, cluster=f"local:{workers}", cluster_output=output)
    seconds = time.perf_counter() - began
    out.unlink()
    return seconds


def simulated(model: Path, workers: int, output: str, pieces: dict[str, float], disk: dict[str, float]) -> dict[str, Any]:
    """The same job as the simulation has it. pieces, disk: the smallest times of what is measured in rounds."""
    plan = quantize_model(model, model.with_name("out.gguf"), TYPE, pure=True, dry_run=True, no_timing=True).plan
    assert plan is not None
    [row] = forecast_cluster(
        plan,
        [workers],
        threads=1,
        output=output,
        read_rate=1 / disk["read"],
        write_rate=1 / disk["write"],
        network_rate=1 / disk["read"],
        relay_rate=1 / pieces["seconds_per_byte"],
        encode_rate=encode_speed(TYPES[TYPE], workers) / workers,
        piece_seconds=pieces["piece_seconds"],
        start_seconds=pieces["start_seconds"],
    ).rows
    pending = list(zip(plan.outputs, plan.locations, strict=True))
    cuts = list(cut(pending, piece_weights(pending, workers)))
    message = sum(len(pickle.dumps(one)) for one in cuts) / len(cuts)
    figures = {"pieces": row.pieces, "piece_message_bytes": message, "simulated": row.simulated, "estimated": row.estimated}
    return figures | {"moved_bytes": plan.total_bytes if output == "collect" else 0}


def summary(rounds: list[Any]) -> Any:
    """What several rounds gave, in the same form, with min, median and all rounds in the place of each number."""
    if isinstance(rounds[0], dict):
        return {key: summary([one[key] for one in rounds]) for key in rounds[0]}
    return {"min": min(rounds), "median": statistics.median(rounds), "rounds": rounds}


def smallest(summed: dict[str, Any]) -> dict[str, float]:
    return {name: values["min"] for name, values in summed.items()}


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--workers", default=4, show_default=True, help="Worker processes at most.")
@click.option("--rounds", default=5, show_default=True)
@click.option("--quick", is_flag=True, help="A hundredth of the pieces, tasks and bytes: to see that it works.")
@click.option("--checkpoint", type=click.Path(exists=True, path_type=Path), help="Also forecast this model, by --recipe.")
@click.option("--recipe", default="deepseek-v3-iq4_k_r4", show_default=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(
    folder: Path, workers: int, rounds: int, quick: bool, checkpoint: Path | None, recipe: str, json_file: Path | None
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    part, counts = 100 if quick else 1, range(1, workers + 1)
    model, loads, measured = random_model(folder), [], []
    for number in range(rounds):
        loads.append(os.getloadavg()[0])
        measured.append(
            {
                "disk": disk_seconds(folder, DISK_BYTES // part),
                "pieces": {n: per_piece(n, PIECES // part) for n in counts},
                "scheduler_memory": scheduler_memory(TASKS // part, IN_TURN // part),
                "jobs": {o: {n: job_seconds(model, n, o) for n in counts} for o in ("shared", "collect")},
            }
        )
        click.echo(f"round {number + 1}, load {loads[-1]:.1f}: {json.dumps(measured[-1])}", err=True)
    results: dict[str, Any] = {"processors": available_cpus(), "loads": loads, "tasks": TASKS // part, **summary(measured)}
    disk = smallest(results["disk"])
    results["simulated"] = {
        output: {n: simulated(model, n, output, smallest(results["pieces"][n]), disk) for n in counts}
        for output in ("shared", "collect")
    }
    click.echo(json.dumps(results, indent=1))
    if checkpoint is not None:
        machines = (1, 2, 4, 8, 16, 32, 64)
        forecast = plan_memory(checkpoint, recipe=recipe, cluster=machines, cluster_threads=32).cluster
        assert forecast is not None
        results["forecast"] = forecast.as_json()
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
