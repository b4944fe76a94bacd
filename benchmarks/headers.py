"""Seconds and memory of verbs that read headers: of a GGUF, of one in shards, and of a checkpoint, each with a million tensors.

\\b
    python benchmarks/headers.py WORK_FOLDER --tensors 1000000

The tensors have 32 to 256 weights each, all zero: headers are most of the files. Memory is the largest resident set of
a process of its own; the first row is that of a program which only starts.
"""

from __future__ import annotations

import json
import os
import struct
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

COLUMNS = 32
ROLES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
PER_LAYER = 7000
_STRING, _UINT32, _FLOAT32 = 8, 4, 6
_BF16, _Q8_0 = (30, 2, 1), (8, 34, 32)  # id, bytes and weights of a block


def names(count: int) -> Iterator[str]:
    """Names as models have them, a layer of as many experts as it takes after another."""
    for number in range(count):
        block, rest = divmod(number, PER_LAYER)
        expert, role = divmod(rest, len(ROLES))
        yield f"blk.{block}.{ROLES[role]}.{expert}.weight"


def checkpoint_names(count: int) -> Iterator[str]:
    """The first names of Qwen 3's mixtures of experts, whose layers have nine tensors and the experts."""
    yield from ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
    layers, experts = checkpoint_sizes(count)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        parts = ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")
        yield from (f"{prefix}self_attn.{part}.weight" for part in parts)
        yield from (f"{prefix}{part}.weight" for part in ("input_layernorm", "post_attention_layernorm", "mlp.gate"))
        for expert in range(experts):
            yield from (f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for part in ("gate", "up", "down"))


def checkpoint_sizes(count: int) -> tuple[int, int]:
    """(layers, experts of each) of a checkpoint with about as many tensors."""
    layers = max(1, count // 12000)
    return layers, (count - 3) // layers // 3 - 3


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value)) + value.encode()


def _key(key: str, value: float | int | str) -> bytes:
    kinds = {str: (_STRING, lambda v: _text(v)), int: (_UINT32, lambda v: struct.pack("<I", v))}
    kind, encode = kinds.get(type(value), (_FLOAT32, lambda v: struct.pack("<f", v)))
    return _text(key) + struct.pack("<I", kind) + encode(value)


def write_gguf(
    path: Path, all_names: list[str], block: tuple[int, int, int] = _BF16, rows: int = 1, keys: Mapping[str, Any] | None = None
) -> None:
    """Tensors of COLUMNS x rows weights, all zero: a hole in the file. block: as _BF16."""
    type_id, block_bytes, block_weights = block
    layers = -(-len(all_names) // PER_LAYER)
    model: dict[str, Any] = {"general.architecture": "llama", "llama.block_count": layers, "llama.embedding_length": COLUMNS}
    model |= {"llama.attention.head_count": 1, "llama.feed_forward_length": COLUMNS, "llama.context_length": 512}
    model |= {"llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 1e4, **(keys or {})}
    nbytes = COLUMNS * rows * block_bytes // block_weights
    step = -(-nbytes // 32) * 32
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, len(all_names), len(model)))
        file.write(b"".join(_key(key, value) for key, value in model.items()))
        for number, name in enumerate(all_names):
            file.write(_text(name) + struct.pack("<IQQIQ", 2, COLUMNS, rows, type_id, number * step))
        file.truncate(-(-file.tell() // 32) * 32 + len(all_names) * step)


def write_split(folder: Path, count: int, shards: int) -> Path:
    """A GGUF in shards; returns the first."""
    every, paths = list(names(count)), [folder / f"split-{i + 1:05d}-of-{shards:05d}.gguf" for i in range(shards)]
    for i, path in enumerate(paths):
        keys = {"split.no": i, "split.count": shards, "split.tensors.count": count}
        write_gguf(path, every[i * count // shards : (i + 1) * count // shards], keys=keys)
    return paths[0]


def write_checkpoint(folder: Path, count: int, shards: int) -> Path:
    """Safetensors with an index, of a Qwen 3 mixture of experts without a tokenizer; returns the folder."""
    folder.mkdir(exist_ok=True)
    every, index = list(checkpoint_names(count)), {}
    layers, experts = checkpoint_sizes(count)
    for i in range(shards):
        part = every[i * len(every) // shards : (i + 1) * len(every) // shards]
        file, entries, at = f"model-{i + 1:05d}-of-{shards:05d}.safetensors", {}, 0
        for name in part:
            shape = [COLUMNS] if "norm" in name else [experts if "mlp.gate." in name else COLUMNS, COLUMNS]
            nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            entries[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + nbytes]}
            at += nbytes
        header = json.dumps(entries).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            out.truncate(8 + len(header) + at)
        index |= dict.fromkeys(part, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": layers}
    config |= {"hidden_size": COLUMNS, "moe_intermediate_size": COLUMNS, "intermediate_size": COLUMNS, "num_experts": experts}
    config |= {"num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": COLUMNS, "num_experts_per_tok": 2}
    config |= {"vocab_size": COLUMNS, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "max_position_embeddings": 512}
    (folder / "config.json").write_text(json.dumps(config | {"norm_topk_prob": True, "decoder_sparse_step": 1}))
    return folder


def make_files(folder: Path, tensors: int, shards: int) -> None:
    """The models, a recipe, a text and a run's recipe, unless they are there."""
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "checkpoint").exists():
        write_gguf(folder / "bf16.gguf", list(names(tensors)))
        write_gguf(folder / "q8_0.gguf", list(names(tensors)), _Q8_0, rows=8)
        write_split(folder, tensors, shards)
        write_checkpoint(folder / "checkpoint", tensors, shards)
    (folder / "rules.txt").write_text("blk\\.[0-3]\\..*attn_[qk]=q8_0\nattn=q5_0\nffn_down=q5_1\nffn=q4_0\n")
    (folder / "text.txt").write_text("One two three four five. " * 400)
    run = "[source]\nmodel = \"bf16.gguf\"\n[quantize]\nrules = '''\nattn=q5_0\nffn=q4_0\n'''\n"
    (folder / "run.toml").write_text(run)


def commands(folder: Path, tensors: int, shards: int) -> dict[str, list[str]]:
    """Name of a row -> command line. Nothing is written but hashes."""
    bf16, q8_0, checkpoint = (str(folder / name) for name in ("bf16.gguf", "q8_0.gguf", "checkpoint"))
    split, rules, text, out = (
        str(folder / n) for n in (f"split-00001-of-{shards:05d}.gguf", "rules.txt", "text.txt", "out.gguf")
    )
    opening = "import sys; from pathlib import Path; from ggufmill.formats"

    def library(call: str, path: str) -> list[str]:
        return [sys.executable, "-c", f"{opening}{call}(Path(sys.argv[1]))", path]

    def mill(*arguments: str) -> list[str]:
        return [sys.executable, "-m", "ggufmill", *arguments]

    parts = ("--split-max-tensors", str(tensors // shards))
    return {
        "start": mill("quantize", "--help"),
        "open_gguf": library(" import open_gguf; open_gguf", bf16),
        "open_gguf, split": library(" import open_gguf; open_gguf", split),
        "open_safetensors": library(".safetensors import open_safetensors; open_safetensors", checkpoint),
        "inspect": mill("inspect", bf16),
        "inspect, split": mill("inspect", split),
        "inspect --json": mill("inspect", bf16, "--json"),
        "inspect --for llama.cpp": mill("inspect", bf16, "--for", "llama.cpp"),
        "inspect --checksums": mill("inspect", bf16, "--checksums"),
        "inspect, checkpoint": mill("inspect", checkpoint),
        "inspect --json, checkpoint": mill("inspect", checkpoint, "--json"),
        "quantize --dry-run": mill("quantize", bf16, out, "q8_0", "--dry-run"),
        "quantize --dry-run --json": mill("quantize", bf16, out, "q8_0", "--dry-run", "--json"),
        "quantize --recipe --dry-run": mill("quantize", bf16, out, "q8_0", "--recipe", rules, "--dry-run"),
        "quantize Q4_K_M --dry-run": mill("quantize", bf16, out, "Q4_K_M", "--dry-run"),
        "quantize in shards --dry-run": mill("quantize", split, out, "q8_0", "--keep-split", "--dry-run"),
        "quantize --dry-run, checkpoint": mill("quantize", checkpoint, out, "q8_0", "--no-vocab", "--dry-run"),
        "convert --dry-run": mill("convert", checkpoint, out, "--no-vocab", "--dry-run"),
        "run --dry-run": mill("run", str(folder / "run.toml"), "-o", str(folder / "run"), "--dry-run"),
        "split --dry-run": mill("split", bf16, out, *parts, "--dry-run"),
        "merge --dry-run": mill("merge", split, out, "--dry-run"),
        "merge --dry-run --json": mill("merge", split, out, "--dry-run", "--json"),
        "repack --dry-run": mill("repack", q8_0, out, "--dry-run"),
        "repack --dry-run --json": mill("repack", q8_0, out, "--dry-run", "--json"),
        "recipes lint": mill("recipes", "lint", rules, bf16),
        "recipes explain": mill("recipes", "explain", bf16, "--recipe", rules),
        "plan, quantised": mill("plan", q8_0),
        "plan --type": mill("plan", bf16, "--type", "Q4_K_M"),
        "plan --type --json": mill("plan", bf16, "--type", "Q4_K_M", "--json"),
        "plan": mill("plan", bf16),
        "metadata": mill("metadata", bf16),
        "metadata --set --dry-run": mill("metadata", bf16, "--set", "general.name=long", "--dry-run"),
        "convert-endian --dry-run": mill("convert-endian", bf16, out, "--dry-run"),
        "hash": mill("hash", bf16),
        "hash --no-layer": mill("hash", bf16, "--no-layer"),
        "hash --json": mill("hash", bf16, "--json"),
        "perplexity": mill("perplexity", bf16, "-f", text),
        "evaluate": mill("evaluate", q8_0, "--against", bf16, "-f", text, "-o", str(folder / "evaluation")),
        "compare": mill("compare", bf16, q8_0, "--tensors", "blk.0.attn_q.0.weight"),
        "imatrix": mill("imatrix", "-m", bf16, "-f", text, "-o", str(folder / "imatrix.gguf")),
        "generate": mill("generate", bf16, "-p", "One"),
        "bench": mill("bench", bf16),
        "warm-up": mill("warm-up", bf16),
    }


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
    with ProcessPoolExecutor(1) as pool:  # the peak of a program counts that of the one that starts it
        pool.submit(make_files, folder, tensors, shards).result()
    print("| what | seconds | MB | exit code |\n|---|---|---|---|")
    for name, command in commands(folder, tensors, shards).items():
        if only is None or only in name:
            seconds, memory, code = measured(command)
            print(f"| {name} | {seconds:.1f} | {memory:,.0f} | {code} |", flush=True)


if __name__ == "__main__":
    main()
