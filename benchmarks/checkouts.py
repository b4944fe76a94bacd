"""This checkout against another one: are encoded bytes equal, and is anything slower?

\\b
    python benchmarks/checkouts.py OTHER_PYTHON codecs
    python benchmarks/checkouts.py OTHER_PYTHON runtime --models out/models
    python benchmarks/checkouts.py OTHER_PYTHON commands --models out/models

OTHER_PYTHON is the interpreter of an environment in which the other checkout is installed. Two processes, one of each
checkout, run alternately, so that a drift of the machine's speed affects both. Figures are ratios of speeds, this checkout's
over the other's: the median over the rounds of each case, and its spread, the largest distance of a round's ratio from it.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any
from urllib.error import URLError
from urllib.request import Request, urlopen

import click

DEMO = Path(__file__).parent.parent / "recipes" / "demo"

# What both checkouts run: a line of JSON in, a line of JSON out. It uses names only that stay from version to version.
WORKER = r"""
import hashlib, json, os, sys, time
import numpy as np
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model

clock = getattr(time, sys.argv[1])

def data(rows, n):
    rng = np.random.default_rng(7)
    x = rng.standard_t(5, (rows, n)).astype(np.float32)
    x[1, :256] = 0
    x[2, 5] = 40
    return x, rng.chisquare(1, n).astype(np.float32) + np.float32(1e-3)

def best(run, seconds):
    times, end = [], time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        began = clock()
        run()
        times.append(clock() - began)
    return min(times)

def codec(type, rows, n, seconds):
    x, importance = data(rows, n)
    q = encode(x, type, importance)
    digests = [hashlib.sha256(q.tobytes()).hexdigest()]
    try:
        digests.append(hashlib.sha256(encode(x, type).tobytes()).hexdigest())
    except Exception as error:
        digests.append(type_of(error))
    digests.append(hashlib.sha256(decode(q, type, n).tobytes()).hexdigest())
    return {
        "digests": digests,
        "encode": best(lambda: encode(x, type, importance), seconds),
        "decode": best(lambda: decode(q, type, n), seconds / 2),
    }

def type_of(error):
    return type(error).__name__

MODELS = {}

def speeds(path, threads, prompt, generation):
    model = MODELS.get((path, threads))
    if model is None:
        MODELS.clear()
        model = MODELS[path, threads] = load_model(path, threads=threads)
        session = model.session(256)
        session.feed(list(range(64)))
        session.feed([1])
    tokens = np.random.default_rng(1).integers(0, model.n_vocab, prompt).tolist()
    session = model.session(prompt + generation)
    began = clock()
    session.feed(tokens)
    middle = clock()
    for i in range(generation):
        session.feed([i])
    return {"pp": middle - began, "tg": clock() - middle}

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)
for line in sys.stdin:
    request = json.loads(line)
    answers.write(json.dumps(globals()[request.pop("do")](**request)) + "\n")
    answers.flush()
"""


@dataclass(frozen=True)
class Given:
    """What the command line says: the other checkout's Python, rounds, the file of ratios, and a function of `time`."""

    other: str
    rounds: int
    out: Path | None
    clock: str


class Worker:
    """One checkout's process."""

    def __init__(self, python: str, clock: str):
        self.process = subprocess.Popen([python, "-c", WORKER, clock], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(json.dumps({"do": do, **arguments}) + "\n")
        stdin.flush()
        line = stdout.readline()
        if not line:
            raise SystemExit(f"the worker of {self.process.args} ended")
        return json.loads(line)


@contextmanager
def workers(given: Given) -> Iterator[tuple[Worker, Worker]]:
    """(this checkout's, the other's)."""
    both = Worker(sys.executable, given.clock), Worker(given.other, given.clock)
    try:
        yield both
    finally:
        for worker in both:
            worker.process.kill()


def alternate(
    rounds: int, ours: Callable[[], dict[str, float]], theirs: Callable[[], dict[str, float]]
) -> dict[str, list[float]]:
    """Ratios of speeds, theirs' seconds over ours', per measured name; which begins changes from round to round."""
    ratios: dict[str, list[float]] = {}
    for i in range(rounds):
        first, second = (ours, theirs) if i % 2 == 0 else (theirs, ours)
        a, b = first(), second()
        our_seconds, their_seconds = (a, b) if i % 2 == 0 else (b, a)
        for name in our_seconds:
            ratios.setdefault(name, []).append(their_seconds[name] / our_seconds[name])
    return ratios


def show(case: str, ratios: dict[str, list[float]], medians: dict[str, dict[str, float]]) -> None:
    for name, values in ratios.items():
        middle = median(values)
        medians.setdefault(name, {})[case] = middle
        spread = max(abs(value - middle) for value in values)
        click.echo(f"{case:32} {name:10} {middle:6.3f}  +/- {spread:.3f}")


def conclude(medians: dict[str, dict[str, float]], out: Path | None) -> None:
    for name, cases in medians.items():
        worst = min(cases, key=cases.__getitem__)
        mean = geometric_mean(cases.values())
        click.echo(f"{name}: geometric mean {mean:.3f} over {len(cases)} cases, least {cases[worst]:.3f} ({worst})")
    if out is not None:
        out.write_text(json.dumps(medians, indent=1) + "\n")


@click.group(help=__doc__)
@click.argument("other")
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="Write all ratios to this file.")
@click.option("--processor-time", is_flag=True, help="Seconds of the processor, of all threads: what else runs counts less.")
@click.pass_context
def main(context: click.Context, other: str, rounds: int, out: Path | None, processor_time: bool) -> None:
    context.obj = Given(other, rounds, out, "process_time" if processor_time else "perf_counter")


@main.command(help="Every type: equal bytes, and speeds of encoders and decoders on one thread.")
@click.option("--types", default="", help="Only these, joined by commas.")
@click.option("--seconds", default=0.4, show_default=True, help="Per measurement.")
@click.pass_obj
def codecs(given: Given, types: str, seconds: float) -> None:
    from ggufmill.formats import TYPES
    from ggufmill.quantize import can_encode

    names = types.split(",") if types else [t.name for t in TYPES.values() if can_encode(t) and not t.name.startswith("q4_0_")]
    medians: dict[str, dict[str, float]] = {}
    unequal = []
    with workers(given) as (ours, theirs):
        for name in names:
            slow = any(name.endswith(end) for end in ("_kt",))
            request = {"type": name, "rows": 16 if slow else 64, "n": 2048, "seconds": seconds}
            digests = ours.ask("codec", **request)["digests"], theirs.ask("codec", **request)["digests"]
            if digests[0] != digests[1]:
                unequal.append(name)

            def run(worker: Worker, request: dict[str, Any] = request) -> dict[str, float]:
                answer = worker.ask("codec", **request)
                return {key: answer[key] for key in ("encode", "decode")}

            show(name, alternate(given.rounds, lambda: run(ours), lambda: run(theirs)), medians)
    click.echo(f"{len(names) - len(unequal)} of {len(names)} types have equal bytes; others: {', '.join(unequal) or 'none'}")
    conclude(medians, given.out)


@main.command(help="Prompts of 512 tokens and generation of 64, for every GGUF file of a folder.")
@click.option("--models", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--threads", default="1,2", show_default=True)
@click.option("--prompt", default=512, show_default=True)
@click.option("--generation", default=64, show_default=True)
@click.pass_obj
def runtime(given: Given, models: Path, threads: str, prompt: int, generation: int) -> None:
    medians: dict[str, dict[str, float]] = {}
    with workers(given) as (ours, theirs):
        for path in sorted(models.glob("*.gguf")):
            for count in map(int, threads.split(",")):
                request = {"path": str(path), "threads": count, "prompt": prompt, "generation": generation}
                both = [lambda w=worker, a=request: w.ask("speeds", **a) for worker in (ours, theirs)]
                for run in both:  # loads the model, and compiles what it needs
                    run()
                show(f"{path.stem}, {count} thread{'s'[: count > 1]}", alternate(given.rounds, *both), medians)
    conclude(medians, given.out)


@main.command(
    help="Complete commands on the demo checkpoint, from start to end, a server until its first answer: --help, inspect, plan, "
    "convert, imatrix, quantize, perplexity, serve, run demo."
)
@click.option("--cold", is_flag=True, help="Kernels are compiled again each time.")
@click.option("--only", default="", help="Only these commands, joined by commas.")
@click.pass_obj
def commands(given: Given, cold: bool, only: str) -> None:
    medians: dict[str, dict[str, float]] = {}
    clock = time.perf_counter if given.clock == "perf_counter" else seconds_of_children
    with tempfile.TemporaryDirectory() as folder:
        text, source = str(DEMO / "calibration.txt"), f"{folder}/source.gguf"
        subprocess.run([sys.executable, "-m", "ggufmill", "convert", str(DEMO), source], check=True, capture_output=True)
        cases = {
            "--help": ["--help"],
            "quantize --help": ["quantize", "--help"],
            "inspect": ["inspect", source],
            "plan": ["plan", source],
            "convert": ["convert", str(DEMO), f"{folder}/out.gguf", "--force"],
            "imatrix": ["imatrix", source, "-f", text, "-o", f"{folder}/out.imatrix", "--chunks", "40", "--force"],
            "quantize": ["quantize", source, f"{folder}/q.gguf", "IQ4_K", "--force"],
            "perplexity": ["perplexity", source, "-f", text, "--chunks", "40"],
            "serve": ["serve", source, "--port", str(free_port())],
            "run demo": ["run", "demo", "-o", f"{folder}/run", "--force"],
        }
        for case in only.split(",") if only else cases:
            seconds: dict[str, list[float]] = {sys.executable: [], given.other: []}

            def run(
                python: str, arguments: list[str] = cases[case], seconds: dict[str, list[float]] = seconds
            ) -> dict[str, float]:
                with tempfile.TemporaryDirectory() as cache:
                    seconds[python].append(time_command(python, arguments, cache if cold else None, clock))
                return {"seconds": seconds[python][-1]}

            if not cold:
                run(sys.executable)
                run(given.other)
            show(case, alternate(given.rounds, lambda: run(sys.executable), lambda: run(given.other)), medians)
            ours, theirs = (median(values[not cold :]) for values in seconds.values())
            click.echo(f"{'':32} {ours:.2f} s here, {theirs:.2f} s there")
    conclude(medians, given.out)


def time_command(python: str, arguments: list[str], cache: str | None, clock: Callable[[], float]) -> float:
    """Seconds until a command has ended, or a server has answered its first request; cache: the folder of kernels, else the
    user's. Modules are kept compiled, as they are for users."""
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""} | ({"GGUFMILL_CACHE": cache} if cache else {})
    command, began = [python, "-m", "ggufmill", *arguments], clock()
    if arguments[0] != "serve":
        subprocess.run(command, check=True, capture_output=True, env=environment)
        return clock() - began
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    try:
        body = json.dumps({"prompt": "def main", "max_tokens": 8}).encode()
        url = f"http://127.0.0.1:{arguments[-1]}/v1/completions"
        while server.poll() is None:
            try:
                urlopen(Request(url, body, {"Content-Type": "application/json"})).read()
                if clock is seconds_of_children:  # which count when they have ended
                    server.terminate()
                    server.wait()
                return clock() - began
            except URLError:
                time.sleep(0.02)
        raise SystemExit(f"{' '.join(command)} ended with {server.returncode}")
    finally:
        server.terminate()
        server.wait()


def seconds_of_children() -> float:
    """Of the processor, of all processes that this one started and that have ended."""
    times = os.times()
    return times.children_user + times.children_system


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


if __name__ == "__main__":
    main()
