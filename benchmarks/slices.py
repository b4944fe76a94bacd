"""Slices of published models: their config.json with few layers, and weights by a seed, of true widths, experts, vocabulary and
quantisation. What tensors there are, the converter's own descriptions say, so that a slice is a row of SLICES.

\b
    python benchmarks/slices.py out/deepseek-v3 --model DeepSeek-V3
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import click
import ml_dtypes
import numpy as np

from ggufmill.convert.checkpoint_source import describe
from ggufmill.recipes import FOLDER

DEMO = FOLDER / "demo"
SHARD_BYTES = 4 << 30
_POOL = 1 << 24  # weights that are drawn; tensors are these, from different places on
_SPREAD = 0.02  # standard deviation of weights
_GROUP, _BLOCK = 32, 128  # columns with one scale in int4 and mxfp4, rows and columns in fp8

Stored = tuple[str, str, tuple[int, ...]]  # name, dtype of safetensors, shape


@dataclass(frozen=True)
class Slice:
    """config: of the published model, with few layers; kind: how its weights are stored, a key of KINDS."""

    config: dict[str, Any]
    kind: str = "bf16"


def _deepseek(**more: Any) -> dict[str, Any]:
    return {
        "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
        "n_shared_experts": 1, "num_attention_heads": 128, "num_key_value_heads": 128, "q_lora_rank": 1536, "kv_lora_rank": 512,
        "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "vocab_size": 129280, "num_hidden_layers": 2,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 8, "topk_group": 4, "num_experts_per_tok": 8,
        "norm_topk_prob": True, "routed_scaling_factor": 2.5, "scoring_func": "sigmoid", "topk_method": "noaux_tc",
        "num_nextn_predict_layers": 0, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
        "max_position_embeddings": 163840, "attention_bias": False, "tie_word_embeddings": False, "bos_token_id": 0,
        "eos_token_id": 1, "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096, "beta_fast": 32,
                         "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0},
    } | more  # fmt: skip


def _llama(hidden: int, inner: int, heads: int, layers: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": 8, "num_hidden_layers": layers, "vocab_size": 128256,
        "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "max_position_embeddings": 131072, "tie_word_embeddings": False,
        "hidden_act": "silu", "torch_dtype": "bfloat16",
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 8192},
    }  # fmt: skip


_FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [_BLOCK, _BLOCK]}
_INT4 = {
    "quant_method": "compressed-tensors", "format": "pack-quantized",
    "ignore": ["re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*", "lm_head"],
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": _GROUP}}},
}  # fmt: skip

SLICES = {
    "DeepSeek-V3": Slice(
        _deepseek(architectures=["DeepseekV3ForCausalLM"], model_type="deepseek_v3", quantization_config=_FP8), "fp8"
    ),
    "Kimi-K2.5": Slice(
        {
            "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25", "tie_word_embeddings": False,
            "text_config": _deepseek(
                model_type="kimi_k2", n_routed_experts=384, num_attention_heads=64, num_key_value_heads=64, vocab_size=163840,
                n_group=1, topk_group=1, routed_scaling_factor=2.827, max_position_embeddings=262144, rope_theta=50000.0,
                quantization_config=_INT4,
                rope_scaling={"type": "yarn", "factor": 64.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                              "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            ),
        },
        "int4",
    ),
    "Qwen3-235B-A22B": Slice(
        {
            "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 4096,
            "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128, "num_experts_per_tok": 8,
            "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 151936,
            "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True, "rms_norm_eps": 1e-6,
            "rope_theta": 1e6, "max_position_embeddings": 40960, "tie_word_embeddings": False, "hidden_act": "silu",
        }
    ),
    "gpt-oss-120b": Slice(
        {
            "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
            "num_local_experts": 128, "num_experts_per_tok": 4, "num_attention_heads": 64, "num_key_value_heads": 8,
            "head_dim": 64, "num_hidden_layers": 4, "vocab_size": 201088, "sliding_window": 128, "rms_norm_eps": 1e-5,
            "layer_types": ["sliding_attention", "full_attention"] * 2, "attention_bias": True, "swiglu_limit": 7.0,
            "rope_theta": 150000, "max_position_embeddings": 131072, "tie_word_embeddings": False, "hidden_act": "silu",
            "rope_scaling": {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "beta_fast": 32.0,
                             "beta_slow": 1.0, "truncate": False},
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn",
                                    "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]},
        },
        "mxfp4",
    ),
    "GLM-4.6": Slice(
        {
            "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "hidden_size": 5120, "intermediate_size": 12288,
            "moe_intermediate_size": 1536, "n_routed_experts": 160, "n_shared_experts": 1, "num_experts_per_tok": 8,
            "num_attention_heads": 96, "num_key_value_heads": 8, "head_dim": 128, "num_hidden_layers": 2, "vocab_size": 151552,
            "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
            "use_qk_norm": True, "attention_bias": True, "partial_rotary_factor": 0.5, "rms_norm_eps": 1e-5,
            "rope_theta": 1e6, "max_position_embeddings": 202752, "tie_word_embeddings": False, "hidden_act": "silu",
            "num_nextn_predict_layers": 0,
        }
    ),
    "Llama-3.1-8B": Slice(_llama(4096, 14336, 32, 4)),
    "Llama-3.1-70B": Slice(_llama(8192, 28672, 64, 2)),
    "Qwen3-Next-80B-A3B": Slice(
        {
            "architectures": ["Qwen3NextForCausalLM"], "model_type": "qwen3_next", "hidden_size": 2048,
            "intermediate_size": 5120, "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512,
            "num_experts": 512, "num_experts_per_tok": 10, "num_attention_heads": 16, "num_key_value_heads": 2,
            "head_dim": 256, "num_hidden_layers": 4, "full_attention_interval": 4, "linear_num_key_heads": 16,
            "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
            "linear_conv_kernel_dim": 4, "partial_rotary_factor": 0.25, "decoder_sparse_step": 1, "mlp_only_layers": [],
            "norm_topk_prob": True, "vocab_size": 151936, "rms_norm_eps": 1e-6, "rope_theta": 1e7,
            "max_position_embeddings": 262144, "tie_word_embeddings": False, "hidden_act": "silu",
        }
    ),
    "Gemma-4-31B": Slice(
        {
            "architectures": ["Gemma4ForCausalLM"], "model_type": "gemma4_text", "hidden_size": 5376,
            "intermediate_size": 21504, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 256,
            "global_head_dim": 512, "num_global_key_value_heads": 4, "attention_k_eq_v": True, "num_hidden_layers": 6,
            "layer_types": ["sliding_attention"] * 5 + ["full_attention"], "sliding_window": 1024,
            "hidden_size_per_layer_input": 0, "final_logit_softcapping": 30.0, "vocab_size": 262144, "rms_norm_eps": 1e-6,
            "max_position_embeddings": 262144, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
        }
    ),
}  # fmt: skip


def _fp8(name: str, shape: tuple[int, ...]) -> list[Stored]:
    if not name.endswith("proj.weight") and not name.endswith("_proj_with_mqa.weight"):
        return [(name, "BF16", shape)]
    rows, columns = shape
    return [(name, "F8_E4M3", shape), (f"{name}_scale_inv", "F32", (-(-rows // _BLOCK), -(-columns // _BLOCK)))]


def _int4(name: str, shape: tuple[int, ...]) -> list[Stored]:
    name = f"language_model.{name}"
    if ".mlp.experts." not in name:
        return [(name, "BF16", shape)]
    rows, columns = shape
    packed, scale = (rows, columns // 8), (rows, columns // _GROUP)
    return [(f"{name}_packed", "I32", packed), (f"{name}_scale", "BF16", scale), (f"{name}_shape", "I32", (2,))]


def _mxfp4(name: str, shape: tuple[int, ...]) -> list[Stored]:
    if not name.endswith("_blocks"):
        return [(name, "BF16", shape)]
    return [(name, "U8", shape), (name.removesuffix("blocks") + "scales", "U8", shape[:-1])]


# How a weight of the model is stored -> what a checkpoint has for it
KINDS: dict[str, Callable[[str, tuple[int, ...]], list[Stored]]] = {
    "bf16": lambda name, shape: [(name, "BF16", shape)],
    "fp8": _fp8,
    "int4": _int4,
    "mxfp4": _mxfp4,
}
_WIDTHS = {"BF16": 2, "F8_E4M3": 1, "F32": 4, "U8": 1, "I32": 4}


def stored_tensors(folder: Path, kind: str) -> list[Stored]:
    """What the checkpoint of a config.json has, in the order of the layers."""
    model, found = describe(folder), dict[str, tuple[int, ...]]()
    for tensor in model.tensors:
        for number, name in enumerate(tensor.sources):
            found.setdefault(name, tensor.source_shape(number))
    return [stored for name, shape in found.items() for stored in KINDS[kind](name, shape)]


class Pool:
    """Weights by a seed; what is drawn once is used for all tensors, from another place on for each."""

    def __init__(self, seed: int):
        self._rng = np.random.default_rng(seed)
        normal = (self._rng.standard_t(5, _POOL) * _SPREAD).astype(np.float32)
        self._bf16 = normal.astype(ml_dtypes.bfloat16)
        self._fp8 = np.clip(normal * 2000, -440, 440).astype(ml_dtypes.float8_e4m3fn)
        self._bytes = self._rng.integers(0, 256, _POOL, np.uint8)

    def pieces(self, name: str, dtype: str, shape: tuple[int, ...]) -> Iterator[np.ndarray]:
        """The bytes of a tensor, a piece at a time."""
        count = prod(shape)
        if len(shape) < 2 or dtype == "F32" or "_scale" in name:
            yield self._small(name, dtype, shape).view(np.uint8).reshape(-1)
            return
        values = {"BF16": self._bf16, "F8_E4M3": self._fp8}.get(dtype, self._bytes).view(np.uint8)
        left, width = count * _WIDTHS[dtype], 2 if dtype == "BF16" else 1
        while left:
            first = int(self._rng.integers(0, _POOL // 2)) * width
            piece = values[first : first + left]
            yield piece
            left -= len(piece)

    def _small(self, name: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray:
        """Vectors, which norms have around 1, and scales."""
        noise = self._rng.standard_normal(shape).astype(np.float32)
        if dtype == "U8":  # exponents of mxfp4
            return self._rng.integers(118, 123, shape, np.uint8)
        if "_scale_inv" in name:
            return np.abs(1 + 0.1 * noise) / np.float32(2000)
        if "_scale" in name:
            return (np.abs(1 + 0.2 * noise) * np.float32(_SPREAD / 3)).astype(ml_dtypes.bfloat16)
        values = noise * np.float32(_SPREAD) + np.float32("bias" not in name)
        return values if dtype == "F32" else values.astype(ml_dtypes.bfloat16)


def write_slice(folder: Path, name: str, *, seed: int = 0, changes: dict[str, Any] | None = None) -> int:
    """The checkpoint with tokenizer and texts; returns its bytes. changes: of the (text model's) config, for fewer
    experts or other layers."""
    chosen = SLICES[name]
    config = json.loads(json.dumps(chosen.config))
    text = config.get("text_config", config)
    text.update(changes or {})
    if "layer_types" in text:  # of fewer layers the last kinds
        text["layer_types"] = text["layer_types"][-text["num_hidden_layers"] :]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    write_tokenizer(folder, text["vocab_size"])
    shards: list[list[Stored]] = [[]]
    size = 0
    for one in stored_tensors(folder, chosen.kind):
        nbytes = prod(one[2]) * _WIDTHS[one[1]]
        if size + nbytes > SHARD_BYTES and shards[-1]:
            shards.append([])
            size = 0
        shards[-1].append(one)
        size += nbytes
    pool, index, total = Pool(seed), {}, 0
    shapes = {n: shape for shard in shards for n, _, shape in shard}
    for number, shard in enumerate(shards, 1):
        file, entries, at = f"model-{number:05d}-of-{len(shards):05d}.safetensors", {}, 0
        for tensor, dtype, shape in shard:
            nbytes = prod(shape) * _WIDTHS[dtype]
            entries[tensor] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + nbytes]}
            at, index[tensor] = at + nbytes, file
        header = json.dumps(entries).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(header)) + header)
            for tensor, dtype, shape in shard:
                if tensor.endswith("weight_shape"):
                    rows, columns = shapes[tensor.removesuffix("shape") + "packed"]
                    out.write(np.array([rows, columns * 8], np.int32).tobytes())
                    continue
                for piece in pool.pieces(tensor, dtype, shape):
                    out.write(piece.data)
        total += 8 + len(header) + at
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    return total


def write_tokenizer(folder: Path, size: int) -> None:
    """The demo's vocabulary, and pairs of its tokens until it has so many; the special tokens keep their numbers."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    model = tokenizer["model"]
    vocabulary, merges, rng = model["vocab"], model["merges"], np.random.default_rng(0)
    special = {one["content"] for one in tokenizer["added_tokens"]}
    words = [token for token in vocabulary if token not in special and len(token) < 8]
    taken = {one["id"] for one in tokenizer["added_tokens"]} | set(vocabulary.values())
    following = max(taken) + 1
    while following < size:
        for first, second in rng.integers(0, len(words), (4096, 2)).tolist():
            joined = words[first] + words[second]
            if following < size and joined not in vocabulary:
                vocabulary[joined] = following
                merges.append([words[first], words[second]])
                following += 1
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text((DEMO / "tokenizer_config.json").read_text())
    for text in ("calibration.txt", "heldout.txt"):
        (folder / text).write_text((DEMO / text).read_text())


@click.command(help=__doc__)
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--model", type=click.Choice(list(SLICES)), required=True)
@click.option(
    "--set", "changes", multiple=True, metavar="KEY=VALUE", help="Change the config, for example n_routed_experts=32."
)
def main(folder: Path, model: str, changes: tuple[str, ...]) -> None:
    values = {key: json.loads(value) for key, _, value in (change.partition("=") for change in changes)}
    print(f"{write_slice(folder, model, changes=values):,} bytes")


if __name__ == "__main__":
    main()
