"""Seconds and memory that reading headers takes: of a GGUF, of one in shards, and of a checkpoint, each with a million tensors.

\\b
    python benchmarks/headers.py WORK_FOLDER --tensors 1000000

The tensors have 32 weights each: headers are most of the files. Memory is the largest resident set of a process of its own.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator
from pathlib import Path

import click

WEIGHTS = 32
ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
_STRING, _UINT32 = 8, 4


def names(count: int) -> Iterator[str]:
    """Names as models have them, a layer of as many experts as it takes after another."""
    for number in range(count):
        block, rest = divmod(number, 7000)
        expert, role = divmod(rest, len(ROLES))
        yield f"blk.{block}.{ROLES[role]}.{expert}.weight"


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def write_gguf(path: Path, all_names: list[str], keys: dict[str, int] | None = None) -> None:
    """Tensors of f32, all zero: a hole in the file."""
    keys = keys or {}
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(all_names), 1 + len(keys)))
        file.write(_text("general.architecture") + struct.pack("<I", _STRING) + _text("llama"))
        for key, value in keys.items():
            file.write(_text(key) + struct.pack("<II", _UINT32, value))
        for number, name in enumerate(all_names):
            file.write(_text(name) + struct.pack("<IQIQ", 1, WEIGHTS, 0, number * 4 * WEIGHTS))
        file.truncate(-(-file.tell() // 32) * 32 + len(all_names) * 4 * WEIGHTS)


def write_split(folder: Path, count: int, shards: int) -> Path:
    """A GGUF in shards; returns the first."""
    every, paths = list(names(count)), [folder / f"split-{i + 1:05d}-of-{shards:05d}.gguf" for i in range(shards)]
    for i, path in enumerate(paths):
        keys = {"split.no": i, "split.count": shards, "split.tensors.count": count}
        write_gguf(path, every[i * count // shards : (i + 1) * count // shards], keys)
    return paths[0]


def write_checkpoint(folder: Path, count: int, shards: int) -> Path:
    """Safetensors with an index; returns the folder."""
    folder.mkdir(exist_ok=True)
    every, index = list(names(count)), {}
    for i in range(shards):
        part = every[i * count // shards : (i + 1) * count // shards]
        file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        size = 2 * WEIGHTS
        header = json.dumps(
            {
                n: {"dtype": "BF16", "shape": [WEIGHTS], "data_offsets": [at * size, at * size + size]}
                for at, n in enumerate(part)
            }
        )
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header.encode())
            out.truncate(8 + len(header) + len(part) * size)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    (folder / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "model_type": "llama"}))
    return folder


def measured(command: list[str]) -> tuple[float, float, int]:
    """(seconds of the processor, largest resident set in MB, exit code)"""
    quiet = [(os.POSIX_SPAWN_OPEN, stream, os.devnull, os.O_WRONLY, 0) for stream in (1, 2)]
    pid = os.posix_spawn(command[0], command, os.environ, file_actions=quiet)
    _, status, usage = os.wait4(pid, 0)
    return usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024 / 1e6, os.waitstatus_to_exitcode(status)


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--tensors", default=1_000_000, show_default=True)
@click.option("--shards", default=10, show_default=True)
@click.option("--only", help="Only rows with this in their name.")
def main(folder: Path, tensors: int, shards: int, only: str | None) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    one, out, checkpoint = folder / "one.gguf", folder / "out.gguf", folder / "checkpoint"
    if not one.exists():
        write_gguf(one, list(names(tensors)))
        write_split(folder, tensors, shards)
        write_checkpoint(checkpoint, tensors, shards)
    split = folder / f"split-00001-of-{shards:05d}.gguf"
    mill = [sys.executable, "-m", "ggufmill"]
    library = [sys.executable, "-c"]
    opening = "import sys; from pathlib import Path; from ggufmill.formats"
    (folder / "rules.txt").write_text("ffn=q8_0\n")
    rows: dict[str, list[str]] = {
        "open_gguf": [*library, f"{opening} import open_gguf; open_gguf(Path(sys.argv[1]))", str(one)],
        "open_gguf, split": [*library, f"{opening} import open_gguf; open_gguf(Path(sys.argv[1]))", str(split)],
        "open_safetensors": [
            *library,
            f"{opening}.safetensors import open_safetensors; open_safetensors(Path(sys.argv[1]))",
            str(checkpoint),
        ],
        "inspect": [*mill, "inspect", str(one)],
        "inspect, split": [*mill, "inspect", str(split)],
        "inspect --json": [*mill, "inspect", str(one), "--json"],
        "inspect, checkpoint": [*mill, "inspect", str(checkpoint)],
        "quantize --dry-run": [*mill, "quantize", str(one), str(out), "q8_0", "--dry-run"],
        "quantize --dry-run --json": [*mill, "quantize", str(one), str(out), "q8_0", "--dry-run", "--json"],
        "recipes lint": [*mill, "recipes", "lint", str(folder / "rules.txt"), str(one)],
        "metadata": [*mill, "metadata", str(one)],
        "plan": [*mill, "plan", str(one)],
        "split --dry-run": [*mill, "split", str(one), str(out), "--split-max-tensors", str(tensors // shards), "--dry-run"],
    }
    print("| what | seconds | MB | exit code |\n|---|---|---|---|")
    for name, command in rows.items():
        if only is None or only in name:
            seconds, memory, code = measured(command)
            print(f"| {name} | {seconds:.1f} | {memory:,.0f} | {code} |", flush=True)


if __name__ == "__main__":
    main()
