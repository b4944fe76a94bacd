"""Writes a model whose draft layer predicts what the model does, to see what drafting costs and gains at full acceptance.

    python benchmarks/drafts/draft_copies.py OUT.gguf [--layers 16] [--type q4_K]

A dense model (of architecture glm4moe) with random weights and the demo's vocabulary. Of its layers only the first adds
anything to the residual stream: the others' attn_output and ffn_down are zero, but cost as much as any. The draft layer is a
copy of the first layer; eh_proj takes its embeddings, each of which has a norm of 1.
"""

import argparse
from pathlib import Path

import numpy as np

from ggufmill.convert import open_source
from ggufmill.formats import TYPES
from ggufmill.formats.source import SourceTensor, TensorSource
from ggufmill.jobs.execute import execute
from ggufmill.quantize.planning import plan_quantize
from ggufmill.recipes import FOLDER

N, ROWS, HEADS, KV_HEADS = 1536, 4096, 12, 4
EPSILON = 1e-6


def matrix(seed: int, rows: int, columns: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, columns), np.float32) / np.float32(np.sqrt(columns))


def block(number: int, seed: int, *, adds: bool) -> dict[str, np.ndarray]:
    """A layer's tensors; adds: whether it changes the residual stream."""
    width, kv_width = N, N // HEADS * KV_HEADS
    shapes = {"attn_q": (width, N), "attn_k": (kv_width, N), "attn_v": (kv_width, N), "attn_output": (N, width)}
    shapes |= {"ffn_gate": (ROWS, N), "ffn_up": (ROWS, N), "ffn_down": (N, ROWS)}
    out = {f"blk.{number}.{name}.weight": np.ones(N, np.float32) for name in ("attn_norm", "post_attention_norm")}
    for at, (name, shape) in enumerate(shapes.items()):
        is_zero = not adds and name in ("attn_output", "ffn_down")
        out[f"blk.{number}.{name}.weight"] = np.zeros(shape, np.float32) if is_zero else matrix(10 * seed + at, *shape)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--type", default="q4_K")
    options = parser.parse_args()
    demo = open_source(FOLDER / "demo", mla_layout="mainline")
    vocabulary = demo.tensors["token_embd.weight"].shape[1]
    embeddings = matrix(1, vocabulary, N)
    embeddings /= np.sqrt(np.square(embeddings).mean(axis=1, keepdims=True))
    arrays = {"token_embd.weight": embeddings}
    for layer in range(options.layers):
        arrays |= block(layer, 2 if layer == 0 else 3, adds=layer == 0)
    draft = f"blk.{options.layers}."
    arrays |= {name.replace("blk.0.", draft): values for name, values in arrays.items() if name.startswith("blk.0.")}
    arrays[f"{draft}nextn.eh_proj.weight"] = np.concatenate([np.eye(N), np.zeros((N, N))], 1).astype(np.float32)
    arrays |= {f"{draft}nextn.{name}.weight": np.ones(N, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    arrays |= {"output_norm.weight": np.ones(N, np.float32), "output.weight": matrix(4, vocabulary, N)}
    sizes = {"block_count": options.layers + 1, "nextn_predict_layers": 1, "embedding_length": N, "context_length": 4096}
    sizes |= {"feed_forward_length": ROWS, "leading_dense_block_count": options.layers + 1, "attention.head_count": HEADS}
    sizes |= {"attention.head_count_kv": KV_HEADS, "rope.dimension_count": N // HEADS}
    metadata = {key: value for key, value in demo.metadata.items() if key.startswith("tokenizer.")}
    metadata |= {"general.architecture": "glm4moe"} | {f"glm4moe.{key}": np.uint32(value) for key, value in sizes.items()}
    metadata |= {"glm4moe.attention.layer_norm_rms_epsilon": np.float32(EPSILON), "glm4moe.rope.freq_base": np.float32(1e4)}
    tensors = {}
    for name, values in arrays.items():
        rows = np.atleast_2d(values)
        tensors[name] = SourceTensor(name, values.shape[::-1], "f32", lambda a, b, rows=rows: rows[a:b])
    source = TensorSource("copies", metadata, tensors, "copies")
    execute(plan_quantize(source, options.out, type=TYPES[options.type]), force=True)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.0f} MiB")


if __name__ == "__main__":
    main()
