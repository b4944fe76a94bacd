"""Conversion against what copying the same bytes takes, alternately, and against the reference converter.

\\b
    python benchmarks/convert.py WORK_FOLDER --rival path/to/convert_hf_to_gguf.py

Checkpoints are generated: Llama-shaped, bf16 in three files, and the same in fp8 with blocks of 128 x 128. Measured is
from the start of the program until everything is on disk (sync), output removed in between; `cp` copies as many bytes as the
GGUF has. A round runs each command once, since other work on the machine comes and goes; figures are the median of
the rounds, the best, and the median and range of ours against cp's in the same round. Peak memory is of the process alone.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np

from ggufmill.operating_system.processors import available_cpus

MILL = [sys.executable, "-m", "ggufmill", "convert"]
DEMO = Path(__file__).parent.parent / "recipes" / "demo"
BLOCK = 128  # rows and columns that share an fp8 scale


def checkpoint(folder: Path, layers: int, form: str, *, hidden: int = 2048, inner: int = 5632, vocab: int = 32000) -> None:
    """A folder in Hugging Face's form with random weights; form: 'bf16' or 'fp8'."""
    folder.mkdir(parents=True, exist_ok=True)
    width_kv = hidden // 8
    matrices = {
        "mlp.down_proj": (hidden, inner),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "self_attn.k_proj": (width_kv, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.v_proj": (width_kv, hidden),
    }
    entries: list[tuple[str, str, tuple[int, ...]]] = [("model.embed_tokens.weight", "BF16", (vocab, hidden))]
    for i in range(layers):
        for name, shape in matrices.items():
            entries.append((f"model.layers.{i}.{name}.weight", "F8_E4M3" if form == "fp8" else "BF16", shape))
            if form == "fp8":
                grid = (-(-shape[0] // BLOCK), -(-shape[1] // BLOCK))
                entries.append((f"model.layers.{i}.{name}.weight_scale_inv", "F32", grid))
        entries += [
            (f"model.layers.{i}.{n}.weight", "BF16", (hidden,)) for n in ("input_layernorm", "post_attention_layernorm")
        ]
    entries += [("model.norm.weight", "BF16", (hidden,)), ("lm_head.weight", "BF16", (vocab, hidden))]
    draw, item = np.random.default_rng(0), {"BF16": 2, "F8_E4M3": 1, "F32": 4}
    normal = (draw.standard_normal(1 << 22) * 0.02).astype(np.float32)
    pool = {
        "BF16": (normal.view(np.uint32) >> 16).astype(np.uint16).tobytes(),
        "F8_E4M3": draw.integers(0, 0x77, 1 << 22, np.uint8).tobytes(),
        "F32": np.abs(normal).tobytes(),
    }
    weight_map, per = {}, -(-len(entries) // 3)
    for shard in range(3):
        file = f"model-{shard + 1:05d}-of-00003.safetensors"
        header, at = {}, 0
        for name, dtype, shape in (part := entries[shard * per : (shard + 1) * per]):
            size = int(np.prod(shape)) * item[dtype]
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + size]}
            weight_map[name], at = file, at + size
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(len(text).to_bytes(8, "little") + text)
            for _, dtype, shape in part:
                left = int(np.prod(shape)) * item[dtype]
                while left:
                    left -= out.write(pool[dtype][:left])
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "torch_dtype": "bfloat16",
        "tie_word_embeddings": False,
        # Keys without effect here, which one version of the reference asks every Llama for.
        "prefix_dense_intermediate_size": inner,
        "num_experts_per_tok": 1,
    }
    if form == "fp8":
        config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    (folder / "config.json").write_text(json.dumps(config))
    os.sync()


def timed(command: list[str], outputs: list[Path]) -> dict[str, float]:
    """Seconds until everything is on disk, processor seconds and peak memory (MiB) of the command."""
    for path in outputs:
        path.unlink(missing_ok=True)
    os.sync()
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert process.stderr is not None
    messages = process.stderr.read()
    _, status, used = os.wait4(process.pid, 0)
    if status:
        raise click.ClickException(f"{' '.join(command)} failed: {messages.decode(errors='replace')[-2000:]}")
    os.sync()
    seconds = time.perf_counter() - began
    for path in outputs:
        path.unlink(missing_ok=True)
    return {"seconds": seconds, "cpu": used.ru_utime + used.ru_stime, "peak_mib": used.ru_maxrss / 1024}


def race(commands: dict[str, tuple[list[str], list[Path]]], rounds: int) -> dict[str, list[dict[str, float]]]:
    times: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
    for number in range(rounds):
        order = list(commands.items())
        first = number % len(order)
        for name, (command, outputs) in order[first:] + order[:first]:
            times[name].append(timed(command, outputs))
    return times


def report(name: str, times: dict[str, list[dict[str, float]]], nbytes: int) -> dict[str, Any]:
    figures: dict[str, Any] = {"bytes": nbytes, "rounds": times}
    click.echo(f"\n{name}: {nbytes / 1e9:.3f} GB written, {len(times['cp'])} rounds")
    for contender, runs in times.items():
        seconds = [r["seconds"] for r in runs]
        rate = nbytes / median(seconds) / 1e6
        line = f"  {contender:<10} median {median(seconds):6.2f} s ({rate:6.0f} MB/s), best {min(seconds):6.2f}"
        line += f", worst {max(seconds):6.2f}; cpu {median(r['cpu'] for r in runs):5.2f} s, peak {runs[0]['peak_mib']:6.0f} MiB"
        click.echo(line)
        if contender == "cp":
            continue
        ratios = [cp["seconds"] / run["seconds"] for cp, run in zip(times["cp"], runs, strict=True)]
        figures[f"{contender}_of_cp"] = {"median": median(ratios), "least": min(ratios), "most": max(ratios)}
        click.echo(f"             {median(ratios):.0%} of cp's rate (rounds from {min(ratios):.0%} to {max(ratios):.0%})")
    if "reference" in times:
        faster = [r["seconds"] / o["seconds"] for r, o in zip(times["reference"], times["ours"], strict=True)]
        processor = median(r["cpu"] for r in times["reference"]) / median(r["cpu"] for r in times["ours"])
        figures["faster_than_reference"] = {"median": median(faster), "least": min(faster), "processor": processor}
        line = f"{median(faster):.1f} x as fast as the reference (least {min(faster):.1f}); {processor:.1f} x less cpu"
        click.echo(f"             {line}")
    return figures


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--rival", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="convert_hf_to_gguf.py, to race.")
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Its tokenizer files.")
@click.option("--layers", default=20, show_default=True, help="Of 88 MB each in bf16; 20 make 2 GB.")
@click.option("--rounds", default=5, show_default=True)
@click.option("-t", "--threads", type=int, help="[default: all processors]")
@click.option("--only", type=click.Choice(["demo", "bf16", "fp8"]), multiple=True)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write all figures to this file.")
def main(
    folder: Path,
    rival: Path | None,
    tokenizer: Path | None,
    layers: int,
    rounds: int,
    threads: int | None,
    only: tuple[str, ...],
    json_file: Path | None,
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    out, copy, reference = folder / "out.gguf", folder / "copy.bin", folder / "reference.gguf"
    results: dict[str, Any] = {}
    extra = ["-t", str(threads)] if threads else []
    for case in only or ("demo", "bf16", "fp8"):
        source = DEMO if case == "demo" else folder / f"{case}-{layers}"
        if case != "demo" and not (source / "config.json").exists():
            checkpoint(source, layers, case)
        if tokenizer is not None and case != "demo":
            for path in tokenizer.glob("*token*.json"):
                shutil.copy(path, source)
        ours = [*MILL, str(source), str(out), "--outtype", "bf16", *extra]
        timed(ours, [])  # kernels are compiled, files are in memory
        nbytes = out.stat().st_size
        same = folder / f"{case}.same"
        out.replace(same)
        commands = {"cp": (["cp", str(same), str(copy)], [copy]), "ours": (ours, [out])}
        if rival is not None and case == "bf16":
            command = [sys.executable, str(rival), str(source), "--outfile", str(reference), "--outtype", "bf16"]
            commands["reference"] = (command, [reference])
        results[case] = report(case, race(commands, rounds), nbytes)
        same.unlink()
    results["machine"] = {"processors": available_cpus(), "load": os.getloadavg()}
    results["own_peak_mib"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
