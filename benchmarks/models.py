"""Models with random weights, small enough to make in seconds and big enough to measure with.

\b
    python benchmarks/models.py out/models --type q4_K --type iq4_k_r4
    llama-bench -m out/models/dense-q4_K.gguf -p 512 -n 64

`dense` is a Llama of 0.4 billion weights, `wide` one of as many in six layers of the size of those of Llama 3.2 1B, `moe` a
Mixtral-like one of 0.6 billion of which a token uses 0.1. Every layer and every expert has the same weights, made once per
shape: what matters is that they have different addresses. The embedding is f16 (a look-up), the router and the norms are f32.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import numpy as np

from ggufmill.formats import TYPES
from ggufmill.jobs.execute import execute
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.quantize import encode

TARGETS = ("bf16", "q8_0", "q4_K", "iq4_k", "iq4_ks", "iq2_k")


@dataclass(frozen=True)
class Size:
    """Numbers of a model; experts 0: dense."""

    layers: int
    n_embd: int
    n_ff: int
    heads: int
    kv_heads: int
    experts: int = 0
    used: int = 0
    vocabulary: int = 8192

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the model, name -> ne shape."""
        width = self.n_embd // self.heads * self.kv_heads
        stack = (self.experts,) if self.experts else ()
        suffix = "_exps" if self.experts else ""
        layer = {
            "attn_norm": (self.n_embd,),
            "attn_q": (self.n_embd, self.n_embd),
            "attn_k": (self.n_embd, width),
            "attn_v": (self.n_embd, width),
            "attn_output": (self.n_embd, self.n_embd),
            "ffn_norm": (self.n_embd,),
            **({"ffn_gate_inp": (self.n_embd, self.experts)} if self.experts else {}),
            f"ffn_gate{suffix}": (self.n_embd, self.n_ff, *stack),
            f"ffn_up{suffix}": (self.n_embd, self.n_ff, *stack),
            f"ffn_down{suffix}": (self.n_ff, self.n_embd, *stack),
        }
        shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (self.n_embd, self.vocabulary)}
        shapes |= {f"blk.{i}.{name}.weight": shape for i in range(self.layers) for name, shape in layer.items()}
        return shapes | {"output_norm.weight": (self.n_embd,), "output.weight": (self.n_embd, self.vocabulary)}

    def metadata(self, name: str) -> dict[str, Any]:
        values = {
            "block_count": self.layers,
            "context_length": 4096,
            "embedding_length": self.n_embd,
            "feed_forward_length": self.n_ff,
            "attention.head_count": self.heads,
            "attention.head_count_kv": self.kv_heads,
            "rope.dimension_count": self.n_embd // self.heads,
            "vocab_size": self.vocabulary,
        }
        if self.experts:
            values |= {"expert_count": self.experts, "expert_used_count": self.used}
        tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
        token_types = [2, 3, 3] + [6] * 256 + [1] * (self.vocabulary - 259)  # unknown, control, byte, normal
        tokens += [f"word{i}" for i in range(self.vocabulary - len(tokens))]
        return {
            "general.architecture": "llama",
            "general.name": name,
            **{f"llama.{key}": np.uint32(value) for key, value in values.items()},
            "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
            "llama.rope.freq_base": np.float32(10000),
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": np.zeros(self.vocabulary, np.float32),
            "tokenizer.ggml.token_type": np.array(token_types, np.int32),
            "tokenizer.ggml.bos_token_id": np.uint32(1),
            "tokenizer.ggml.eos_token_id": np.uint32(2),
        }


SIZES = {
    "dense": Size(layers=24, n_embd=1024, n_ff=4096, heads=16, kv_heads=8),
    "wide": Size(layers=6, n_embd=2048, n_ff=8192, heads=32, kv_heads=8),
    "moe": Size(layers=12, n_embd=1024, n_ff=512, heads=16, kv_heads=8, experts=32, used=4),
}


@cache
def _matrix(columns: int, rows: int, type_name: str) -> np.ndarray:
    """Bytes of a random matrix; a type that needs importance gets one that favours nothing."""
    random = np.random.default_rng(columns * 31 + rows)
    x = random.standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))
    importance = np.ones(columns, np.float32) if TYPES[type_name].imatrix == "hard" else None
    return encode(x, type_name, importance)


def _output(name: str, shape: tuple[int, ...], type_name: str) -> Output:
    if len(shape) == 1:
        ones = np.ones(shape, np.float32).view(np.uint8).reshape(1, -1)
        return Output(name, shape, "f32", TYPES["f32"], "norm", lambda start, stop: ones)
    tensor_type = TYPES["f32" if "gate_inp" in name else "f16" if "token_embd" in name else type_name]

    def produce(start: int, stop: int) -> np.ndarray:
        first = start // shape[1] * shape[1]
        return _matrix(shape[0], shape[1], tensor_type.name)[start - first : stop - first]

    return Output(name, shape, "random", tensor_type, "benchmark", produce)


def make_model(folder: Path, size: str, type_name: str) -> Path:
    """Writes folder/SIZE-TYPE.gguf unless it is there; returns its path."""
    return write_model(folder / f"{size}-{TYPES[type_name].name}.gguf", SIZES[size], type_name)


def write_model(path: Path, size: Size, type_name: str) -> Path:
    """Writes a model of this size unless the file is there; returns the path."""
    if not path.exists():
        outputs = [_output(name, shape, type_name) for name, shape in size.shapes().items()]
        execute(make_plan(outputs, size.metadata(path.stem), path))
    return path


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--type", "types", multiple=True, help="Default: those that targets exist for, and their repacked types.")
@click.option("--size", "sizes", multiple=True, type=click.Choice(list(SIZES)), help="Default: all.")
def main(folder: Path, types: tuple[str, ...], sizes: tuple[str, ...]) -> None:
    repacked = [packed for name in TARGETS if (packed := TYPES[name].packed)]
    folder.mkdir(parents=True, exist_ok=True)
    for size in sizes or SIZES:
        for name in types or (*TARGETS, *repacked):
            path = make_model(folder, size, name)
            click.echo(f"{path}  {path.stat().st_size / 1e6:.0f} MB")


if __name__ == "__main__":
    main()
