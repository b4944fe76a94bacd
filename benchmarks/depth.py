"""Prompts and generation after many tokens, with caches of several types, beside llama-sweep-bench of ik_llama.cpp.

\b
    python benchmarks/depth.py --rival path/to/llama-sweep-bench --caches f16,q8_0

Models of four layers with random weights as q8_0: `dense` with 4 key heads for 16 heads of 64, `latent` with latent attention
of 512 + 64 (-mla 3); `latent-128` is one layer of that with 128 heads, as DeepSeek-V3 has. Runs of the contenders alternate,
with one thread; all is processor time: the rival's clock is replaced by that of its process (by a small library, for which a C
compiler is needed). Best of the rounds.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from pathlib import Path

import click
import numpy as np
from models import Size, write_model

from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.bench import Runner

_CLOCK = """
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
int clock_gettime(clockid_t id, struct timespec *t) { return syscall(SYS_clock_gettime, CLOCK_PROCESS_CPUTIME_ID, t); }
"""
_DENSE = Size(layers=4, n_embd=1024, n_ff=2048, heads=16, kv_heads=4)
_RANK, _ROPE, _NOPE, _Q_RANK = 512, 64, 128, 512


class _Latent(Size):
    """As `Size`, with latent attention."""

    architecture = "deepseek2"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        names = {"attn_q.", "attn_k.", "attn_v."}
        out = {name: shape for name, shape in super().shapes().items() if not any(part in name for part in names)}
        for i in range(self.layers):
            out |= {
                f"blk.{i}.attn_q_a.weight": (self.n_embd, _Q_RANK),
                f"blk.{i}.attn_q_a_norm.weight": (_Q_RANK,),
                f"blk.{i}.attn_q_b.weight": (_Q_RANK, self.heads * (_NOPE + _ROPE)),
                f"blk.{i}.attn_kv_a_mqa.weight": (self.n_embd, _RANK + _ROPE),
                f"blk.{i}.attn_kv_a_norm.weight": (_RANK,),
                f"blk.{i}.attn_kv_b.weight": (_RANK, self.heads * 2 * _NOPE),
                f"blk.{i}.attn_output.weight": (self.heads * _NOPE, self.n_embd),
            }
        return out

    def metadata(self, name: str) -> dict:
        numbers = {"leading_dense_block_count": self.layers, "attention.q_lora_rank": _Q_RANK, "expert_count": 0}
        numbers |= {"attention.kv_lora_rank": _RANK, "expert_shared_count": 0, "expert_feed_forward_length": 64}
        numbers |= {"attention.key_length": _NOPE + _ROPE, "attention.value_length": _NOPE, "rope.dimension_count": _ROPE}
        values = {key.replace("llama.", "deepseek2."): value for key, value in super().metadata(name).items()}
        values |= {f"deepseek2.{key}": np.uint32(value) for key, value in numbers.items()}
        values["deepseek2.attention.head_count_kv"] = np.uint32(self.heads)
        values["deepseek2.expert_weights_scale"] = np.float32(1)
        return values | {"general.architecture": "deepseek2"}


SIZES = {
    "dense": _DENSE,
    "latent": _Latent(layers=4, n_embd=1024, n_ff=2048, heads=16, kv_heads=16),
    "latent-128": _Latent(layers=1, n_embd=1024, n_ff=2048, heads=128, kv_heads=128),
}
Speeds = dict[int, tuple[float, float]]  # tokens -> of a prompt after them, and of generated ones, tokens per second


def ours(path: Path, cache_type: str, prompt: int, generated: int, tokens: int) -> Speeds:
    """Processor time at each depth."""
    runner, out = Runner(load_model(path, threads=1, fast=True, cache_k=cache_type, cache_v=cache_type)), {}
    for last in (prompt, tokens):  # the first to warm up
        cache = runner.model.new_cache(tokens + generated)
        for depth in range(0, last, prompt):
            began = time.process_time()
            runner.generate(cache, generated)
            middle = time.process_time()
            cache.truncate(depth)
            runner.prompt(cache, prompt)
            out[depth] = prompt / (time.process_time() - middle), generated / (middle - began)
    return out


def rivals(program: Path, path: Path, cache_type: str, prompt: int, tokens: int, clock: Path) -> Speeds:
    """The same of the rival, by its own table. Raises click.ClickException with its last line where it fails."""
    command = f"{program.absolute()} -m {path.absolute()} -c {tokens} -b {prompt} -ub {prompt} -t 1 -fa on -mla 3"
    command += f" -ctk {cache_type} -ctv {cache_type}"
    preloaded = os.environ | {"LD_PRELOAD": str(clock)}
    done = subprocess.run(command.split(), capture_output=True, text=True, env=preloaded, cwd=clock.parent)  # it leaves a log
    number = r"\s*([\d.]+) \|"
    rows = re.findall(r"^\|" + 7 * number, done.stdout + done.stderr, re.M)
    if done.returncode or not rows:
        raise click.ClickException(f"{program.name}: {(done.stderr.splitlines() or ['no reason given'])[-1]}")
    return {int(depth): (float(prompts), float(generation)) for _, _, depth, _, prompts, _, generation in rows}


@click.command(help=__doc__)
@click.option("--rival", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="llama-sweep-bench.")
@click.option("--folder", type=click.Path(file_okay=False, path_type=Path), default=Path("out/models"), show_default=True)
@click.option("--sizes", default="dense,latent", show_default=True)
@click.option("--caches", default="f16,q8_0", show_default=True, help="Types of the cache.")
@click.option("--tokens", default=10240, show_default=True, help="Of the context, in whole prompts.")
@click.option("-p", "--prompt", default=2048, show_default=True, help="Tokens of a prompt, in one pass.")
@click.option("-n", "--generation", default=32, show_default=True, help="Tokens that are generated.")
@click.option("--rounds", default=2, show_default=True)
def main(
    rival: Path | None, folder: Path, sizes: str, caches: str, tokens: int, prompt: int, generation: int, rounds: int
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    if tokens < prompt:
        raise click.UsageError(f"a context of {tokens} tokens holds no prompt of {prompt}")
    tokens = tokens // prompt * prompt  # what is left over no prompt fills, neither here nor there
    click.echo("| model | cache | depth | pp ours | pp rival | ratio | tg ours | tg rival | ratio |")
    click.echo("|---|---|--:|--:|--:|--:|--:|--:|--:|")
    with tempfile.TemporaryDirectory() as temporary:
        clock = Path(temporary) / "clock.so"
        if rival is not None:
            source = clock.with_suffix(".c")
            source.write_text(_CLOCK)
            subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", clock, source], check=True)
        for size in sizes.split(","):
            path = write_model(folder / f"depth-{size}.gguf", SIZES[size], "q8_0")
            for cache_type in caches.split(","):
                found: dict[int, list[list[float]]] = {}
                for _ in range(rounds):
                    runs = [ours(path, cache_type, prompt, generation, tokens)]
                    if rival is not None:
                        runs.append(rivals(rival, path, cache_type, prompt, tokens, clock))
                    for depth, own in runs[0].items():
                        found.setdefault(depth, []).append([*own, *(runs[1][depth] if rival is not None else ())])
                for depth, rows in found.items():
                    best = np.max(rows, axis=0)
                    cells = [size, cache_type, str(depth)]
                    for i in range(2):
                        cells.append(f"{best[i]:.1f}")
                        cells += [f"{best[i + 2]:.1f}", f"{best[i] / best[i + 2]:.2f}"] if rival is not None else ["", ""]
                    click.echo("| " + " | ".join(cells) + " |")


if __name__ == "__main__":
    main()
