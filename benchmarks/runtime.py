"""Prompt and generation speed of complete models, compared with a rival's llama-bench, on the same files and threads.

\b
    python benchmarks/runtime.py --rival path/to/llama-bench --out benchmarks/results
    python benchmarks/runtime.py --types q4_K,q4_K_r4 --sizes dense --threads 2
    python benchmarks/runtime.py --name runtime_zen4 --processor "AMD EPYC Zen 4 (AVX-512 VNNI BF16)"

Models are those of models.py, made when they are not in --models. Runs of the contenders alternate: in each round the rival's
llama-bench (a new process, its own warm-up included) runs both tests once, then ours does. Figures are medians of the rounds;
the spread is the largest distance of a round from its median. The share of bandwidth is (bytes of weights that a token needs) x
(tokens per second generated) / (bytes per second that as many threads read of a large array); the share of the peak, (products
that a token needs) x (tokens per second of the prompt) / (products of bytes per second that as many threads make at best, see
peak.py). After each model file the results
are written; what they hold already is not measured again unless --fresh is given. Types that end in /rounded, with --rounded
all, are run with the setting fast: bf16 weights take activations rounded to bf16, as the rival's do.
--processor-time counts processor time, of one thread (several spin while they wait for each other), in place of the clock, for
a machine that has other work: of the rival what several runs of a test (three, or 256 tokens) take beyond one, of ours as many
runs. -p 0 leaves prompts out.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import prod
from pathlib import Path
from statistics import geometric_mean, median
from typing import Any

import click
import numpy as np
from models import SIZES, TARGETS, make_model
from peak import peaks, read_all

from ggufmill.formats import TYPES, open_gguf
from ggufmill.pipeline.reports.style import COLOURS, INK, PALE, new_axes, save_figure, styled
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.bench import Case, Runner
from ggufmill.runtime.evaluate.provenance import describe_program
from ggufmill.simd import host_cpu
from ggufmill.simd.target import target

OURS, RIVAL = "ours", "rival"
_LONGEST = 1800  # seconds of the clock that the rival may take
# Instructions without which ik_llama.cpp has no products of a type: its llama-perplexity aborts, its llama-bench measures none.
RIVAL_NEEDS = {"bf16_r16": "avx512bf16"}
GOALS = {"pp": 1.15, "tg": 1.05}
ROUNDED = "/rounded"  # ends the name of a type that is run with fast
WORDS = {"pp": "prompt", "tg": "generation"}


def bandwidth(threads: int, nbytes: int = 1 << 29, repeat: int = 5, clock: Callable[[], float] = time.perf_counter) -> float:
    """Bytes per second that so many threads read; the best of several runs."""
    words = np.ones(nbytes // 8, np.int64)
    parts = np.array_split(words, threads)
    read_all(words[:8])
    with ThreadPoolExecutor(threads) as pool:
        times = []
        for _ in range(repeat):
            began = clock()
            list(pool.map(read_all, parts))
            times.append(clock() - began)
    return nbytes / min(times)


def needed_per_token(path: Path) -> dict[str, int]:
    """'bytes_per_token' and 'products_per_token' of the weights that a token needs: all but the embeddings, and of the experts
    those that are used."""
    opened = open_gguf(path)
    used, experts = (int(opened.metadata.get(f"llama.expert{key}", 1)) for key in ("_used_count", "_count"))
    sums = {"bytes_per_token": 0, "products_per_token": 0}
    for name, info in opened.tensors.items():
        if name != "token_embd.weight":
            share = used / experts if "_exps" in name else 1
            sums["bytes_per_token"] += round(info.nbytes * share)
            sums["products_per_token"] += round(prod(info.shape) * share)
    return sums


def runs_of(tokens: int) -> int:
    """How often a test of so many tokens runs for one sample of processor time: one of a few tokens ends before starting the
    rival's process stops scattering."""
    return max(3, 256 // tokens)


def rival_by_processor_time(
    program: Path, model: Path, prompt: int, generation: int, options: Sequence[str] = ()
) -> dict[str, float] | None:
    """As `run_rival` with one thread, by processor time: loading and warming up are in the shorter of two processes, too."""

    def seconds(p: int, n: int, runs: int) -> float | None:
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = run_rival(program, model, 1, p, n, runs, options)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return None if done is None else after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    out = {}
    for name, p, n in (("pp", prompt, 0), ("tg", 0, generation)):
        if p + n:
            runs = runs_of(p + n)
            short, long = seconds(p, n, 1), seconds(p, n, 1 + runs)
            if short is None or long is None:
                return None
            out[name] = runs * (p + n) / (long - short)
    return out


def run_rival(
    program: Path, model: Path, threads: int, prompt: int, generation: int, runs: int = 1, options: Sequence[str] = ()
) -> dict[str, float] | None:
    """{'pp', 'tg'} in tokens per second; None if it cannot run the file. options: of the program, beside those."""
    command = [str(program), "-m", str(model), "-p", str(prompt), "-n", str(generation), "-t", str(threads), *options]
    done = subprocess.run([*command, "-r", str(runs), "-o", "json"], capture_output=True, text=True, timeout=_LONGEST)
    start, end = done.stdout.find("["), done.stdout.rfind("]")
    if done.returncode or start < 0:
        click.echo(f"  the rival failed on {model.name}: {(done.stderr.splitlines() or ['no reason given'])[-1]}", err=True)
        return None
    rows = json.loads(done.stdout[start : end + 1])
    return {"pp" if row["n_prompt"] else "tg": row["avg_ts"] for row in rows}


def measure(
    model: Path,
    rival: Path | None,
    threads: int,
    prompt: int,
    generation: int,
    rounds: int,
    fast: bool = False,
    processor_time: bool = False,
    options: Sequence[str] = (),
) -> dict[str, Any]:
    """Samples of both contenders: {'ours': {'pp': [...], 'tg': [...]}, 'rival': ...}; a test of no tokens is left out.

    processor_time: by it in place of the clock, of one thread. options: of the rival."""
    if processor_time and threads != 1:
        raise click.UsageError("--processor-time is for one thread")
    runner = Runner(load_model(model, threads=threads, fast=fast))
    tests = {key: case for key, case in (("pp", Case(prompt, 0)), ("tg", Case(0, generation))) if case.n_measured}
    for test in tests.values():
        runner.warm_up(test)
    samples: dict[str, dict[str, list[float]]] = {OURS: {key: [] for key in tests}}
    for _ in range(rounds):
        theirs = None
        if rival is not None and processor_time:
            theirs = rival_by_processor_time(rival, model, prompt, generation, options)
        elif rival is not None:
            theirs = run_rival(rival, model, threads, prompt, generation, options=options)
        for key, value in (theirs or {}).items():
            samples.setdefault(RIVAL, {}).setdefault(key, []).append(value)
        for key, test in tests.items():
            runs = runs_of(test.n_measured) if processor_time else 1
            used, clocked = -time.process_time(), sum(runner.seconds(test) for _ in range(runs))
            used += time.process_time()
            samples[OURS][key].append(runs * test.n_measured / (used if processor_time else clocked))
    return samples


def summary(row: dict[str, Any], read_speed: float, peak: float) -> dict[str, Any]:
    """Medians, spreads, ratios, share of bandwidth and, of types with 8-bit activations, of the peak of a measured row."""
    out: dict[str, Any] = {}
    for key in row["samples"][OURS]:
        medians = {name: median(speeds[key]) for name, speeds in row["samples"].items() if speeds.get(key)}
        spreads = [
            max(abs(v / medians[name] - 1) for v in speeds[key]) for name, speeds in row["samples"].items() if speeds.get(key)
        ]
        out[key] = {**medians, "spread": max(spreads)}
        if RIVAL in medians:
            out[key]["ratio"] = medians[OURS] / medians[RIVAL]
    if "tg" in out:
        out["bandwidth_share"] = row["bytes_per_token"] * out["tg"][OURS] / read_speed
    is_float = TYPES[row["type"].removesuffix(ROUNDED)].is_float
    if "pp" in out and "products_per_token" in row and not is_float:  # results of before lack them
        out["peak_share"] = row["products_per_token"] * out["pp"][OURS] / (peak * row["threads"])
    return out


def markdown(report: dict[str, Any]) -> str:
    machine = report["program"]
    speeds = ", ".join(f"{float(b) / 1e9:.1f} GB/s on {t}" for t, b in report["bandwidth"].items())
    by = " by processor time" if report.get("processor_time") else ""
    tests = " and ".join(f"{key}{report[word]}" for key, word in WORDS.items() if report[word])
    lines = [
        f"{tests}, tokens per second{by}, medians of {report['rounds']} interleaved rounds; "
        f"{report['processor']}, level {report['level']}, ggufmill {machine['ggufmill']}, "
        f"numba {machine['numba']}; bandwidth {speeds} threads; {report['peak'] / 1e9:.0f} G products of bytes per second and "
        "thread at best.",
        "",
        *_notes(report),
        "| model | type | threads | pp ours | pp rival | ratio | of peak | tg ours | tg rival | ratio | of memory | spread |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in report["rows"]:
        s, cells = row["summary"], [row["size"], row["type"], str(row["threads"])]
        for key in WORDS:
            forms = ((OURS, ".1f"), (RIVAL, ".1f"), ("ratio", ".2f"))
            cells += [f"{s[key][k]:{form}}" if k in s.get(key, ()) else "-" for k, form in forms]
            share = "peak_share" if key == "pp" else "bandwidth_share"
            cells.append(f"{s[share]:.0%}" if share in s else "-")
        cells.append(f"{max(s[key]['spread'] for key in WORDS if key in s):.0%}")
        lines.append("| " + " | ".join(cells) + " |")
    for key, word in WORDS.items():
        ratios = [row["summary"][key]["ratio"] for row in report["rows"] if "ratio" in row["summary"].get(key, ())]
        if ratios:
            reached = sum(r >= GOALS[key] for r in ratios)
            mean = geometric_mean(ratios)
            lines += ["", f"{word}: geometric mean of the ratios {mean:.2f}; {reached} of {len(ratios)} reach {GOALS[key]}."]
    return "\n".join(lines) + "\n"


def _notes(report: dict[str, Any]) -> list[str]:
    if not any(row["type"].endswith(ROUNDED) for row in report["rows"]):
        return []
    return [f"{ROUNDED}: with `fast`, as generation and serving run: activations are rounded as the rival's are.", ""]


@styled
def plot(report: dict[str, Any], path: Path) -> None:
    """Ratios by type, for prompts and generation; bars of error are the largest distance of a round from its median."""
    rows = [row for row in report["rows"] if all("ratio" in row["summary"].get(key, ()) for key in WORDS)]
    types = list(dict.fromkeys(row["type"] for row in rows))
    series = list(dict.fromkeys((row["size"], row["threads"]) for row in rows))
    if not rows:
        return
    figure, panels = new_axes(2, 1, max(8, 1.1 * len(types)), 8, sharex=True)
    width = 0.8 / len(series)
    for axes, (key, word) in zip(panels, WORDS.items(), strict=True):
        for i, (size, threads) in enumerate(series):
            found = {r["type"]: r["summary"][key] for r in rows if (r["size"], r["threads"]) == (size, threads)}
            positions = [types.index(name) + width * (i - (len(series) - 1) / 2) for name in found]
            ratios = [one["ratio"] for one in found.values()]
            spreads = [one["ratio"] * one["spread"] for one in found.values()]
            label = f"{size}, {threads} thread{'s' if threads > 1 else ''}"
            error = {"elinewidth": 0.8, "ecolor": INK, "capsize": 2}
            axes.bar(positions, ratios, 0.9 * width, yerr=spreads, error_kw=error, label=label, color=COLOURS[i % len(COLOURS)])
        axes.axhline(1, color=INK, linewidth=0.8)
        if GOALS[key] != 1:
            axes.axhline(GOALS[key], color=PALE, linewidth=1, linestyle="--", label=f"goal {GOALS[key]}")
        axes.set(ylabel="times the rival's speed", title=word, ylim=(0, None))
        axes.grid(visible=False, axis="x")
    panels[1].set_xticks(range(len(types)), types, rotation=30, ha="right")
    panels[0].legend(ncols=len(series) + 1, loc="lower center", bbox_to_anchor=(0.5, 1.06))
    processor = f", {report['processor']}" if "processor" in report else ""  # which results of earlier versions lack
    figure.suptitle(f"pp{report['prompt']} and tg{report['generation']}{processor}", fontsize=11)
    save_figure(figure, path)


def with_repacked(names: list[str]) -> list[str]:
    """Each type followed by its repacked type."""
    return [name for base in names for name in (base, TYPES[base].packed) if name]


@click.command(help=__doc__)
@click.option("--rival", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="llama-bench to compare with.")
@click.option(
    "--models", "folder", type=click.Path(file_okay=False, path_type=Path), default=Path("out/models"), show_default=True
)
@click.option("--tmp", is_flag=True, help="Delete each model file that was made here after its use.")
@click.option("--types", help="Comma-separated; default: the targets and their repacked types.")
@click.option("--rounded", is_flag=True, help="All types with fast, as generation and serving run.")
@click.option("--sizes", default=",".join(SIZES), show_default=True)
@click.option("--threads", default="1,2", show_default=True)
@click.option("-p", "--prompt", default=512, show_default=True)
@click.option("-n", "--generation", default=64, show_default=True)
@click.option("--rounds", default=3, show_default=True, type=click.IntRange(1))
@click.option(
    "--minutes", default=20.0, show_default=True, help="No new model file is begun after so long; run again to go on."
)
@click.option("--processor-time", is_flag=True, help="Count processor time, of one thread, in place of the clock.")
@click.option("--fresh", is_flag=True, help="Measure again what the results hold already.")
@click.option("--name", default="runtime", show_default=True, help="Of the files of results.")
@click.option("--processor", help="What to call it; default: as the system names it.")
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), default=Path("benchmarks/results"), show_default=True)
def main(
    rival: Path | None,
    folder: Path,
    tmp: bool,
    types: str | None,
    rounded: bool,
    sizes: str,
    threads: str,
    prompt: int,
    generation: int,
    rounds: int,
    minutes: float,
    processor_time: bool,
    fresh: bool,
    name: str,
    processor: str | None,
    out: Path,
) -> None:
    began, file = time.monotonic(), out / f"{name}.json"
    names, counts = types.split(",") if types else with_repacked(list(TARGETS)), [int(t) for t in threads.split(",")]
    names = [name.removesuffix(ROUNDED) + ROUNDED for name in names] if rounded else names
    settings = {"prompt": prompt, "generation": generation, "rounds": rounds, "processor_time": processor_time}
    old = json.loads(file.read_text()) if file.exists() and not fresh else {}
    old_rows = old.get("rows", []) if all(old.get(k, False) == v for k, v in settings.items()) else []
    alone = {name for name, needs in RIVAL_NEEDS.items() if needs not in host_cpu.features()}
    done = {
        (r["size"], r["type"], r["threads"]): r
        for r in old_rows
        if rival is None or RIVAL in r["samples"] or r["type"].removesuffix(ROUNDED) in alone
    }
    speeds = {int(t): v for t, v in old.get("bandwidth", {}).items()}
    peak = peaks()["bytes"]
    out.mkdir(parents=True, exist_ok=True)
    folder.mkdir(parents=True, exist_ok=True)

    def save() -> dict[str, Any]:
        load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
        for row in done.values():
            row["summary"] = summary(row, speeds[row["threads"]], peak)
        program = describe_program()
        machine = {"processor": processor or program["cpu"], "level": target().level, "program": program, "load": load}
        report = {**settings, **machine, "bandwidth": speeds, "peak": peak, "rows": list(done.values())}
        part = file.with_suffix(".part")
        part.write_text(json.dumps(report, indent=1) + "\n")
        part.replace(file)
        file.with_suffix(".md").write_text(markdown(report), "utf-8")
        return report

    for size in sizes.split(","):
        for wanted in names:
            base = wanted.removesuffix(ROUNDED)
            label = TYPES[base].name + wanted[len(base) :]
            missing = [t for t in counts if (size, label, t) not in done]
            if not missing:
                continue
            if time.monotonic() - began > 60 * minutes:
                click.echo(f"the {minutes:g} minutes are over before {size} {wanted}; the same command goes on there", err=True)
                break
            existed = (folder / f"{size}-{TYPES[base].name}.gguf").exists()
            path = make_model(folder, size, base)
            for t in missing:
                row = {"size": size, "type": label, "threads": t, **needed_per_token(path)}
                is_rounded = label != TYPES[base].name
                beside = None if TYPES[base].name in alone else rival
                row["samples"] = measure(path, beside, t, prompt, generation, rounds, is_rounded, processor_time)
                clock = time.process_time if processor_time else time.perf_counter
                speeds[t] = max(bandwidth(t, clock=clock), speeds.get(t, 0.0))  # the best ever seen: other work only takes away
                s = summary(row, speeds[t], peak)
                done[size, label, t] = row
                ratios = [f"{k} {s[k][OURS]:.1f} ({s[k].get('ratio', float('nan')):.2f} x)" for k in row["samples"][OURS]]
                click.echo(f"{size} {label} {t} threads: {', '.join(ratios)}", err=True)
            save()
            if tmp and not existed:
                path.unlink()
    report = save()
    click.echo(markdown(report))
    try:
        plot(report, file.with_suffix(".png"))
    except ImportError:
        click.echo("no picture without matplotlib", err=True)


if __name__ == "__main__":
    main()
