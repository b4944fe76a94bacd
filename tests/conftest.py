"""Checkpoint folders for tests: tiny random models of each architecture, and DeepSeek-V3 in full size with nothing in it."""

import json
import os
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from ggufmill.cli import main
from ggufmill.runtime.text.tokenizer import Tokenizer

pytest_plugins = ["end_of_run", "selection"]

# What tests start with sys.executable: in emulation the interpreter only runs through its launcher (tests/levels.py sets this).
sys.executable = os.environ.get("GGUFMILL_TEST_PYTHON", sys.executable)

# How long an example takes depends on the machine, and on what else it does.
settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# Triton's kernels run in its interpreter, unless they are to be tested on a device; it reads this once, when it is imported.
os.environ.setdefault("TRITON_INTERPRET", "0" if os.environ.get("GGUFMILL_TORCH_DEVICE", "cpu").startswith("cuda") else "1")

DTYPES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float64": "F64",
    "int8": "I8",
    "uint8": "U8",
    "int32": "I32",
    "int64": "I64",
}
BYTES = {"F8_E4M3": 1, "BF16": 2, "F32": 4}


@pytest.fixture(scope="session", autouse=True)
def short_timing():
    """Forecasts time each encoder by a call or two, not for a tenth of a second."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("ggufmill.quantize.timing.SECONDS", 0.0)
        yield


@pytest.fixture(scope="session", autouse=True)
def texts_are_encoded_once():
    """Hundreds of tests read the demo's texts, which take longer to encode than their windows to compute: each process does it
    once for a vocabulary."""
    known, encode = {}, Tokenizer._encode_valid

    def encode_once(self, text):
        if len(text) < 10_000:
            return encode(self, text)
        key = text, self._thousands, self._backend.to_str()
        if key not in known:
            known[key] = encode(self, text)
        return list(known[key])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tokenizer, "_encode_valid", encode_once)
        yield


def write_shard(path, entries, arrays=None):
    """entries: name -> (dtype, shape). Without arrays the file has its full size, but no data: a hole."""
    header, at = {}, 0
    for name, (dtype, shape) in entries.items():
        size = int(np.prod(shape, dtype=np.int64)) * (arrays[name].itemsize if arrays else BYTES[dtype])
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + size]}
        at += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for array in (arrays or {}).values():
            file.write(np.ascontiguousarray(array).view(np.uint8).tobytes() if array.ndim else array.tobytes())
        file.truncate(8 + len(text) + at)


def write_vocabulary(folder):
    """The smallest one: a word, and no token that is set before a text."""
    (folder / "vocab.txt").write_text("[UNK]\n")


def write_folder(folder, config, tensors, shards=1, vocab=True):
    """config.json, and the arrays (ml_dtypes for bf16 and fp8) in `shards` files with an index. Returns the folder.

    vocab: with a vocabulary, which other files of a tokenizer take precedence over."""
    folder.mkdir(exist_ok=True)
    if vocab:
        write_vocabulary(folder)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    files = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    for i, file in enumerate(files):
        part = {n: tensors[n] for n in names[i::shards]}
        write_shard(folder / file, {n: (DTYPES[str(a.dtype)], a.shape) for n, a in part.items()}, part)
    weight_map = {name: files[i % shards] for i, name in enumerate(names)}
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


@pytest.fixture
def write_checkpoint():
    return write_folder


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "vocab_size": 40,
    "torch_dtype": "float32",
}


def llama_tensors(c, dtype=np.float32):
    """Random weights for a config.json like LLAMA, under Hugging Face's names."""
    draw = np.random.default_rng(1)
    hidden, inner = c["hidden_size"], c["intermediate_size"]
    size = c.get("head_dim") or hidden // c["num_attention_heads"]
    q, kv = size * c["num_attention_heads"], size * c["num_key_value_heads"]
    projections = {
        "self_attn.q_proj": (q, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    shapes = {"model.embed_tokens.weight": (c["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (c["vocab_size"], hidden)
    for i in range(c["num_hidden_layers"]):
        for name, shape in projections.items():
            shapes[f"model.layers.{i}.{name}.weight"] = shape
            if c.get("attention_bias" if "attn" in name else "mlp_bias"):
                shapes[f"model.layers.{i}.{name}.bias"] = shape[:1]
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{i}.{name}.weight"] = (hidden,)
    return {name: draw.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


@pytest.fixture
def tiny_llama():
    """(config, tensors) for write_checkpoint; keyword arguments are keys of config.json."""

    def build(dtype=np.float32, **changes):
        config = LLAMA | changes
        return config, llama_tensors(config, dtype)

    return build


DEEPSEEK = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "moe_intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_nextn_predict_layers": 1,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "max_position_embeddings": 640,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 16,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "vocab_size": 40,
    "torch_dtype": "bfloat16",
}


def deepseek_shapes(c):
    """Name -> (dtype, shape) of a DeepSeek checkpoint as published: fp8 projections with a scale per block, bf16 besides."""
    block = (c.get("quantization_config") or {}).get("weight_block_size")
    hidden, inner = c["hidden_size"], c["moe_intermediate_size"]
    heads, nope, rope, value = (c[k] for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    out = {"model.embed_tokens.weight": ("BF16", (c["vocab_size"], hidden))}

    def projection(name, rows, columns):
        out[f"{name}.weight"] = ("F8_E4M3" if block else "BF16", (rows, columns))
        if block:
            out[f"{name}.weight_scale_inv"] = ("F32", (-(-rows // block[0]), -(-columns // block[1])))

    def feed_forward(name, size):
        projection(f"{name}.gate_proj", size, hidden)
        projection(f"{name}.up_proj", size, hidden)
        projection(f"{name}.down_proj", hidden, size)

    for i in range(c["num_hidden_layers"] + c.get("num_nextn_predict_layers", 0)):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            out[f"{layer}.{norm}.weight"] = ("BF16", (hidden,))
        attn = f"{layer}.self_attn"
        if c["q_lora_rank"]:
            projection(f"{attn}.q_a_proj", c["q_lora_rank"], hidden)
            out[f"{attn}.q_a_layernorm.weight"] = ("BF16", (c["q_lora_rank"],))
            projection(f"{attn}.q_b_proj", heads * (nope + rope), c["q_lora_rank"])
        else:
            projection(f"{attn}.q_proj", heads * (nope + rope), hidden)
        projection(f"{attn}.kv_a_proj_with_mqa", c["kv_lora_rank"] + rope, hidden)
        out[f"{attn}.kv_a_layernorm.weight"] = ("BF16", (c["kv_lora_rank"],))
        projection(f"{attn}.kv_b_proj", heads * (nope + value), c["kv_lora_rank"])
        projection(f"{attn}.o_proj", hidden, heads * value)
        if i < c["first_k_dense_replace"]:
            feed_forward(f"{layer}.mlp", c["intermediate_size"])
            continue
        out[f"{layer}.mlp.gate.weight"] = ("BF16", (c["n_routed_experts"], hidden))
        if c["topk_method"] == "noaux_tc":
            out[f"{layer}.mlp.gate.e_score_correction_bias"] = ("F32", (c["n_routed_experts"],))
        for e in range(c["n_routed_experts"]):
            feed_forward(f"{layer}.mlp.experts.{e}", inner)
        feed_forward(f"{layer}.mlp.shared_experts", inner * c["n_shared_experts"])
        if i >= c["num_hidden_layers"]:  # multi-token prediction
            for name, shape in (("enorm", (hidden,)), ("hnorm", (hidden,)), ("eh_proj", (hidden, 2 * hidden))):
                out[f"{layer}.{name}.weight"] = ("BF16", shape)
            out[f"{layer}.shared_head.norm.weight"] = ("BF16", (hidden,))
            out[f"{layer}.shared_head.head.weight"] = ("BF16", (c["vocab_size"], hidden))
            out[f"{layer}.embed_tokens.weight"] = ("BF16", (c["vocab_size"], hidden))
    out["model.norm.weight"] = ("BF16", (hidden,))
    out["lm_head.weight"] = ("BF16", (c["vocab_size"], hidden))
    return out


@pytest.fixture
def tiny_deepseek():
    """(config, tensors) for write_checkpoint, with random weights; `block` gives fp8 with a scale per block of that size."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    kinds = {"F8_E4M3": ml_dtypes.float8_e4m3fn, "BF16": ml_dtypes.bfloat16, "F32": np.float32}

    def build(block=None, **changes):
        config = DEEPSEEK | changes
        if block:
            config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": list(block)}
        draw = np.random.default_rng(2)
        shapes = deepseek_shapes(config)
        return config, {n: draw.standard_normal(shape).astype(kinds[dtype]) for n, (dtype, shape) in shapes.items()}

    return build


@pytest.fixture(scope="session")
def header_only_deepseek_v3(tmp_path_factory):
    """Folder of DeepSeek-V3 671B in fp8: 163 shards of full size with real headers, and holes in place of the weights."""
    return write_deepseek_v3(tmp_path_factory.mktemp("deepseek-v3"), 61, 163)


@pytest.fixture(scope="session")
def header_only_deepseek_v3_layers(tmp_path_factory):
    """The same with the first 8 of its 61 layers, 5 of them with experts: its plan takes an eighth of the time."""
    return write_deepseek_v3(tmp_path_factory.mktemp("deepseek-v3-layers"), 8, 20)


def write_deepseek_v3(folder, layers, shards):
    config = DEEPSEEK | {
        "hidden_size": 7168,
        "intermediate_size": 18432,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": layers,
        "first_k_dense_replace": 3,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_group": 8,
        "topk_group": 4,
        "num_attention_heads": 128,
        "num_key_value_heads": 128,
        "q_lora_rank": 1536,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "vocab_size": 129280,
        "quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
    }
    config["rope_scaling"] = config["rope_scaling"] | {"original_max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))
    write_vocabulary(folder)
    shapes = deepseek_shapes(config)
    sizes = np.cumsum([BYTES[dtype] * int(np.prod(shape, dtype=np.int64)) for dtype, shape in shapes.values()])
    weight_map = {}
    parts = [{} for _ in range(shards)]
    for (name, entry), end in zip(shapes.items(), sizes.tolist(), strict=True):
        number = min(shards - 1, end * shards // sizes[-1])
        parts[number][name] = entry
        weight_map[name] = f"model-{number + 1:05d}-of-{shards:06d}.safetensors"
    for number, part in enumerate(parts):
        write_shard(folder / f"model-{number + 1:05d}-of-{shards:06d}.safetensors", part)
    index = {"metadata": {"total_size": int(sizes[-1])}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


@pytest.fixture
def sparse_llama():
    """A Llama checkpoint in f32 of about 34 MB per layer whose weights are a hole in the file: all zeros, quick to make."""

    def build(folder, layers):
        config = LLAMA | {
            "hidden_size": 1024,
            "intermediate_size": 2048,
            "num_hidden_layers": layers,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "vocab_size": 256,
        }
        shapes = {name: t.shape for name, t in llama_tensors(config | {"num_hidden_layers": 1}).items()}
        layer = {n: s for n, s in shapes.items() if ".layers.0." in n}
        entries = {n: ("F32", s) for n, s in shapes.items() if n not in layer}
        entries |= {n.replace(".0.", f".{i}."): ("F32", s) for i in range(layers) for n, s in layer.items()}
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        write_vocabulary(folder)
        write_shard(folder / "model.safetensors", entries)
        return folder

    return build


@pytest.fixture
def mill(capsys):
    """Runs the command line here; returns (exit code, stdout, stderr)."""

    def run(*arguments):
        with pytest.raises(SystemExit) as ended:
            main([str(a) for a in arguments])
        captured = capsys.readouterr()
        return ended.value.code, captured.out, captured.err

    return run
