"""What this machine reaches, beside a rival that was built on it: one command, one page.

\b
    python benchmarks/all.py --rival path/to/ik_llama.cpp/build
    python benchmarks/all.py --only codecs,runtime --out out/benchmarks

--rival is the folder in which ik_llama.cpp was built; llama-bench, llama-quantize and libggml are looked for in it, and what is
not there is not compared with. llama.cpp's encoders are compared where llama-cpp-python is installed. Parts: codecs (encoding
and decoding by type), runtime (prompts and generation of models with random weights and the setting fast, as generation and
serving set it, with shares of the processor's peak and of the memory's bandwidth), gemv (products from memory by type), jobs
(whole jobs). Each part is a script of this folder with its own options, figures and statement of noise. Its results stay in
--out with the commit, the rival and the options that they are of: a part that is there is run again only if these differ, or
with --fresh. Let nothing else run: the page says how busy the machine was.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import geometric_mean, mean
from typing import Any

import click
from peak import peaks
from slices import write_slice

import ggufmill
import runtime
from ggufmill.operating_system.processors import available_cpus, processor_name
from ggufmill.runtime.evaluate.provenance import describe_program, file_digest
from ggufmill.simd.target import target

HERE = Path(__file__).parent
QUICK_TYPES = "q8_0,q4_K,iq4_k,iq2_xxs"
# Of the model that whole jobs convert: .3 billion weights.
JOB_MODEL = {"hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 4, "vocab_size": 8192}
JOB_TYPES = {False: "q4_K,q6_K,iq4_k,iq2_k,iq3_xxs", True: "q4_K"}


@dataclass(frozen=True)
class Rival:
    """Programs and library of a rival that was built in a folder; None: not found."""

    folder: Path | None
    bench: Path | None
    quantize: Path | None
    library: Path | None

    @classmethod
    def of(cls, folder: Path | None) -> Rival:
        return cls(folder, *(_find(folder, name) for name in ("llama-bench", "llama-quantize", "libggml.so")))

    def files(self) -> list[str]:
        """A line for each file that was found: where it is in the folder, without the user's path, the commit that it
        was built from, as far as the build knows it, and its hash."""
        found, config = (self.bench, self.quantize, self.library), _find(self.folder, "llama-config.cmake")
        said = re.search(r"LLAMA_BUILD_COMMIT (\w+)", config.read_text("utf-8")) if config else None
        commit, root = said[1] if said else "unknown", self.folder or Path()
        return [f"{path.relative_to(root)}, commit {commit}, {file_digest(path)}" for path in found if path]


def _find(folder: Path | None, name: str) -> Path | None:
    return next(iter(sorted(folder.rglob(name))), None) if folder is not None else None


@dataclass(frozen=True)
class Settings:
    """out: folder of the results; models: of models; quick: fewer types, and one round."""

    out: Path
    models: Path
    rival: Rival
    threads: list[int]
    quick: bool

    def script(self, name: str, *options: Any, **environment: str) -> str:
        """Runs a script of this folder and returns what it prints."""
        command = [sys.executable, str(HERE / f"{name}.py"), *map(str, options)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, env=os.environ | environment)
        if done.returncode:
            raise click.ClickException(f"{name}.py failed with exit code {done.returncode}")
        return done.stdout

    def origin(self) -> dict[str, Any]:
        """What results depend on, as JSON."""
        machine = {"processor": processor_name(), "level": target().level}
        programs = {"ggufmill": _revision(), "rival": self.rival.files()}
        for name in ("numba", "llama-cpp-python"):
            with suppress(PackageNotFoundError):
                programs[name] = version(name)
        return {**programs, "threads": self.threads, "quick": self.quick, **machine}


def _revision() -> str:
    """The version of the package that is measured; of a checkout, its commit, too, and a digest of what is changed in it."""
    root, number = Path(ggufmill.__path__[0]), describe_program()["ggufmill"]

    def git(*command: str) -> bytes:
        return subprocess.run(["git", "-C", str(root), *command], stdout=subprocess.PIPE, check=True).stdout.strip()

    if not (root / ".git").exists():
        return number
    try:
        commit, changes = git("describe", "--always").decode(), git("diff", "HEAD")
    except (OSError, subprocess.CalledProcessError):  # it says why
        return number
    return f"{number}, commit {commit}" + (f", changed ({hashlib.sha256(changes).hexdigest()[:8]})" if changes else "")


def _codecs(settings: Settings, file: Path) -> None:
    library = settings.rival.library
    few = ["--types", QUICK_TYPES, "--repeat", 2] if settings.quick else []
    settings.script("codecs", "--json", file, *few, **({"GGML_LIBRARY": str(library)} if library else {}))


def _codecs_table(report: dict[str, Any]) -> str:
    lines = [
        "Million elements per second on one thread, and how many times as fast as the rival's.",
        "",
        "| type | encode, with importance | x ik | x llama.cpp | encode | x ik | decode | x ik | spread |",
        "|---|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        cells, speeds = [row["type"]], row["speed"]
        for task, rivals in (("importance", ("reference", "mainline")), ("plain", ("reference",)), ("decode", ("reference",))):
            own = speeds.get(task, {}).get("ours")
            cells.append(f"{own['best']:,.1f}" if own else "-")
            for rival in rivals:
                other = speeds.get(task, {}).get(rival)
                cells.append(f"{own['best'] / other['best']:.2f}" if own and other else "-")
        cells.append(f"{max(one['spread'] for speed in speeds.values() for one in speed.values()):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", *(f"- geometric mean of {what}: {mean:.2f}" for what, mean in report["means"].items())]
    return "\n".join(lines)


def _runtime(settings: Settings, file: Path) -> None:
    rival = ["--rival", settings.rival.bench] if settings.rival.bench else []
    few = ["--types", QUICK_TYPES, "--sizes", "dense", "--rounds", 1] if settings.quick else ["--minutes", "inf"]
    options = ["--rounded", "--models", settings.models, "--threads", ",".join(map(str, settings.threads)), "--tmp"]
    settings.script("runtime", *rival, *few, *options, "--out", file.parent, "--name", file.stem)


def _gemv(settings: Settings, file: Path) -> None:
    types = QUICK_TYPES.split(",") if settings.quick else []
    file.write_text(settings.script("gemv", *types, "--json", "--threads", *settings.threads), "utf-8")


def _gemv_table(report: dict[str, Any]) -> str:
    lines = [
        "One token times weights from memory, by processor time: of the bytes per second of a plain sum of the same bytes.",
        "",
        "| type | threads | GB/s | share | lowest share | G products/s |",
        "|---|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        cells = (
            row["type"],
            row["threads"],
            row["gigabytes_per_second"],
            f"{row['share']:.0%}",
            f"{row['lowest_share']:.0%}",
            row["giga_products_per_second"],
        )
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines)


def _jobs(settings: Settings, file: Path) -> None:
    model = settings.models / "slice"
    if not model.exists():
        write_slice(model, "Llama-3.1-8B", changes=JOB_MODEL)
    rival = ["--rival", settings.rival.quantize] if settings.rival.quantize else []
    options = ["--types", JOB_TYPES[settings.quick], "--threads", max(settings.threads), "--json", file]
    settings.script("jobs", model, file.parent / "jobs", *rival, *options)


def _jobs_table(report: dict[str, Any]) -> str:
    lines = [
        f"Seconds of the clock from start to end, {report['threads']} threads: ours before and after the other's.",
        "",
        "| job | ours | other | x of ours |",
        "|---|--:|--:|--:|",
    ]
    ratios = []
    for job, times in report["jobs"].items():
        own, other = times["ours, clock"], times.get("theirs, clock")
        ratio = "" if other is None else f"{other / mean(own):.2f}"
        lines.append(f"| {job} | {own[0]:.2f}, {own[1]:.2f} | {'' if other is None else f'{other:.2f}'} | {ratio} |")
        if other is not None and job.startswith("quantize"):
            ratios.append(other / mean(own))
    if ratios:
        lines += ["", f"- geometric mean of llama-quantize over ours: {geometric_mean(ratios):.2f}"]
    return "\n".join(lines)


@dataclass(frozen=True)
class Part:
    """A heading, what measures and writes a JSON file, and what makes Markdown of it."""

    heading: str
    measure: Callable[[Settings, Path], None]
    table: Callable[[dict[str, Any]], str]


PARTS = {
    "codecs": Part("Encoders and decoders", _codecs, _codecs_table),
    "runtime": Part("Prompts and generation", _runtime, runtime.markdown),
    "gemv": Part("Products from memory", _gemv, _gemv_table),
    "jobs": Part("Whole jobs", _jobs, _jobs_table),
}


def _load() -> float:
    """Processes that wanted to run during the last minute, on average."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else float("nan")


def _machine(settings: Settings, origin: dict[str, Any], load: float) -> str:
    best = peaks()
    speeds = {t: runtime.bandwidth(t) for t in settings.threads}
    return "\n".join(
        [
            f"- {origin['processor']}, {available_cpus()} logical processors, level {origin['level']}",
            f"- ggufmill {origin['ggufmill']}; numba {origin['numba']}",
            f"- reads {', '.join(f'{s / 1e9:.1f} GB/s on {t} threads' for t, s in speeds.items())}",
            f"- one thread multiplies {best['bytes'] / 1e9:.0f} G bytes a second, {best['floats'] / 1e9:.0f} G of float32",
            f"- load before the first part {load:.2f}, after the last {_load():.2f}: above 1 other work ran at the beginning",
            *(f"- rival: {line}" for line in origin["rival"]),
        ]
    )


@click.command(help=__doc__)
@click.option("--rival", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Where ik_llama.cpp was built.")
@click.option("--only", help="Comma-separated parts. [default: all]")
@click.option("--threads", default="1,2", show_default=True)
@click.option("--quick", is_flag=True, help="A few types and one round; all takes some 17 minutes of a Zen 5.")
@click.option("--fresh", is_flag=True, help="Measure again what is there already.")
@click.option("--models", type=click.Path(path_type=Path), default=Path("out/models"), show_default=True)
@click.option("--out", type=click.Path(path_type=Path), default=Path("out/benchmarks"), show_default=True)
def main(rival: Path | None, only: str | None, threads: str, quick: bool, fresh: bool, models: Path, out: Path) -> None:
    names = only.split(",") if only else list(PARTS)
    if unknown := [name for name in names if name not in PARTS]:
        raise click.UsageError(f"no part {', '.join(unknown)}; there are {', '.join(PARTS)}")
    settings = Settings(out, models, Rival.of(rival), [int(t) for t in threads.split(",")], quick)
    out.mkdir(parents=True, exist_ok=True)
    load, origin, pages = _load(), settings.origin(), []
    for name in names:
        file = out / f"{name}.json"
        begun = file.with_suffix(".origin")  # of the results that a script has written, of which some may be missing
        report = json.loads(file.read_text()) if file.exists() and not fresh else {}
        if report.get("origin") != origin:
            click.echo(f"{name} ...", err=True)
            if fresh or not begun.exists() or json.loads(begun.read_text()) != origin:
                file.unlink(missing_ok=True)  # scripts add to what they find
            begun.write_text(json.dumps(origin) + "\n")
            PARTS[name].measure(settings, file)
            report = json.loads(file.read_text()) | {"origin": origin}
            file.write_text(json.dumps(report, indent=1) + "\n")
            begun.unlink()
        pages.append(f"## {PARTS[name].heading}\n\n{PARTS[name].table(report)}")
    page = "\n\n".join(["# What this machine reaches", _machine(settings, origin, load), *pages]) + "\n"
    (out / "benchmarks.md").write_text(page, "utf-8")
    click.echo(page)


if __name__ == "__main__":
    main()
