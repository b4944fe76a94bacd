"""Whole files of every kind that is fuzzed, small, with as much in them as their parsers know."""

import json
import struct
from pathlib import Path

import numpy as np
import xxhash

from ggufmill.convert.architectures.registry import ARCHITECTURES
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.formats.types import TYPES
from ggufmill.imatrix.collect_state import CollectState
from ggufmill.imatrix.covariance.files import Origin
from ggufmill.imatrix.covariance.writer import CovarianceWriter, PlannedInput
from ggufmill.imatrix.entries import Imatrix
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.recipes import FOLDER


def _file(metadata, directory) -> bytes:
    header, _, size = header_bytes(metadata, directory, 32)
    return header + bytes(size - len(header))


def gguf() -> bytes:
    metadata = {
        "general.architecture": "llama",
        "general.alignment": np.uint32(32),
        "a.flag": True,
        "a.list": ["x", "yy"],
        "a.numbers": np.arange(3, dtype=np.int32),
        "a.flags": np.array([True, False]),
        "a.float": np.float32(0.5),
    }
    directory = [("a.weight", (32, 4), TYPES["q4_0"]), ("b", (5,), TYPES["f32"]), ("c", (256, 4, 2), TYPES["iq4_k_r4"])]
    return _file(metadata, directory)


def shard(number: int) -> bytes:
    """A file of a model in two."""
    keys = {"split.no": np.uint16(number), "split.count": np.uint16(2), "split.tensors.count": np.int32(3)}
    tensors = [("a", (32, 4), TYPES["q4_0"]), ("b", (5,), TYPES["f32"]), ("c", (256, 4, 2), TYPES["iq4_k_r4"])]
    return _file({"general.architecture": "llama"} | keys, tensors[number : 2 * number + 1])


def models() -> list[bytes]:
    """Llama and a mixture of experts with their vocabularies: byte-level, with scores, unigram, WordPiece."""
    made = []
    for kind in ("gpt2", "llama", "t5", "bert"):
        architecture = "qwen3moe" if kind == "gpt2" else "llama"
        sizes = {"block_count": 1, "context_length": 64, "embedding_length": 32, "feed_forward_length": 32}
        sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "rope.dimension_count": 16}
        metadata = {f"{architecture}.{key}": np.uint32(value) for key, value in sizes.items()}
        metadata |= {f"{architecture}.attention.layer_norm_rms_epsilon": np.float32(1e-5)}
        metadata |= {f"{architecture}.rope.freq_base": np.float32(1e4), "general.architecture": architecture}
        tokens = ["<s>", "</s>", "H", "e", "l", "o", "He", "\u2581", "<0x00>", "\u0120", ",", "lo", "[UNK]"]
        vocabulary = {"model": kind, "pre": "qwen2", "tokens": tokens}
        vocabulary |= {"bos_token_id": np.uint32(0), "eos_token_id": np.uint32(1)}
        vocabulary |= {"token_type": np.array([3, 3] + [1] * 6 + [6, 1, 1, 1, 2], np.int32), "unknown_token_id": np.uint32(12)}
        vocabulary |= {"scores": -np.arange(13, dtype=np.float32), "merges": ["H e", "l o"], "add_bos_token": True}
        metadata |= {f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()}
        metadata |= {"tokenizer.chat_template": "{{ messages }}"}
        names = {"attn_q": (32, 32), "attn_k": (32, 16), "attn_v": (32, 16), "attn_output": (32, 32), "attn_norm": (32,)}
        names |= {"ffn_norm": (32,)}
        if architecture == "qwen3moe":
            more = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 32, "attention.key_length": 16}
            metadata |= {f"{architecture}.{key}": np.uint32(value) for key, value in more.items()}
            names |= {"attn_q_norm": (16,), "attn_k_norm": (16,), "ffn_gate_inp": (32, 4)}
            names |= {f"ffn_{part}_exps": (32, 32, 4) for part in ("up", "gate", "down")}
        else:
            metadata |= {"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": np.float32(4)}
            metadata |= {"llama.rope.scaling.original_context_length": np.uint32(16)}
            names |= {f"ffn_{part}": (32, 32) for part in ("up", "gate", "down")}
        names = {f"blk.0.{name}.weight": shape for name, shape in names.items()}
        names |= {"token_embd.weight": (32, 13), "output_norm.weight": (32,), "output.weight": (32, 13)}
        kinds = {name: "q8_0" if len(shape) > 1 and "inp" not in name else "f32" for name, shape in names.items()}
        made.append(_file(metadata, [(name, shape, TYPES[kinds[name]]) for name, shape in names.items()]))
    return made


HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 12]},
    "b": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [12, 16]},
    "c": {"dtype": "F32", "shape": [], "data_offsets": [16, 20]},
}


def safetensors() -> bytes:
    text = json.dumps(HEADER).encode()
    return len(text).to_bytes(8, "little") + text + bytes(20)


def released() -> bytes:
    header = json.dumps(HEADER).encode()
    return json.dumps({"size": 8 + len(header) + 20, "mtime_ns": 5}).encode() + b"\n" + header


INDEX = b'{"metadata": {"total_size": 16}, "weight_map": {"a": "a.safetensors", "b": "a.safetensors"}}'


def imatrix(path: Path) -> bytes:
    stack = (np.ones((3, 8), np.float32), np.array([512, 0, 5], np.int64))
    entry = (np.ones((1, 8), np.float32), np.array([512], np.int64))
    Imatrix({"blk.0.ffn_up_exps.weight": stack, "output.weight": entry}, ["text"], 3).save(path)
    return path.read_bytes()


def state(path: Path) -> bytes:
    sums, counts = {"a": np.ones((2, 8)), "b": np.ones((1, 4))}, {"a": np.array([3, 0]), "b": np.array([5])}
    CollectState("f", 2, sums, counts, np.arange(4), (2, 1.5, 0.25), (1.0, 2.0), 0.5).save(path)
    return path.read_bytes()


def covariance(path: Path) -> bytes:
    inputs = [PlannedInput(("blk.0.attn_q.weight", "blk.0.attn_k.weight"), 8, 1), PlannedInput(("blk.0.x.weight",), 4, 2)]
    writer = CovarianceWriter(path, inputs, Origin("llama", "a model", ("text",), 2, 16))
    writer.begin()
    for one in inputs:
        for matrix in range(one.matrices):
            writer.write(one.name, matrix, Covariance(np.eye(one.columns, dtype=np.float32), 32))
    writer.finish()
    return path.read_bytes()


PEFT = json.dumps(
    {"peft_type": "LORA", "lora_alpha": 6, "r": 4, "use_rslora": True, "fan_in_fan_out": False, "bias": "none"}
    | {"alpha_pattern": {"q_a_proj": 3}, "rank_pattern": {"self_attn.o_proj": 2}, "target_modules": ["q_a_proj", "o_proj"]}
).encode()


def factors() -> bytes:
    """Of two modules of the demo, as peft saves them."""
    shapes = {"q_a_proj": (256, 256), "o_proj": (256, 256)}
    header, end = {}, 0
    for module, (rows, columns) in shapes.items():
        for part, shape in (("A", (2, columns)), ("B", (rows, 2))):
            size = 4 * shape[0] * shape[1]
            name = f"base_model.model.model.layers.0.self_attn.{module}.lora_{part}.weight"
            header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [end, end + size]}
            end += size
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(end)


def adapter() -> bytes:
    metadata = {"general.type": "adapter", "adapter.type": "lora", "general.architecture": "deepseek2"}
    shapes = {"blk.0.attn_q_a.weight.lora_a": (256, 2), "blk.0.attn_q_a.weight.lora_b": (2, 256)}
    shapes |= {"token_embd.weight.lora_a": (2, 1536), "token_embd.weight.lora_b": (2, 256)}
    metadata |= {"adapter.lora.alpha": np.float32(4)}
    return _file(metadata, [(name, shape, TYPES["f32"]) for name, shape in shapes.items()])


BPE = {
    "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "<0x41>": 3}, "merges": ["a b"], "unk_token": "a"},
    "added_tokens": [{"id": 4, "content": "<s>", "special": True}],
    "pre_tokenizer": {"type": "ByteLevel"},
    "decoder": {"type": "ByteLevel"},
    "post_processor": {"type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>"}}, {"Sequence": {"id": "A"}}]},
}
TOKENIZER = BPE | {"normalizer": {"type": "NFC"}}
WITH_SPACES = BPE | {
    "pre_tokenizer": {"type": "Metaspace", "prepend_scheme": "first"},
    "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "\u2581"}, {"type": "NFKC"}]},
    "decoder": {"type": "Sequence", "decoders": []},
}
SPLIT = {"type": "Split", "pattern": {"Regex": "\\s+|\\w+"}, "behavior": "Isolated", "invert": False}
BY_REGEX = BPE | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [SPLIT, {"type": "ByteLevel", "use_regex": False}]}}
UNIGRAM = {
    "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0], ["\u2581a", -1.5], ["<0x41>", -2]]},
    "added_tokens": [{"id": 3, "content": "<x>", "special": False}],
    "normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"},
    "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "WhitespaceSplit"}, {"type": "Metaspace"}]},
}
PIECEWISE = {
    "model": {"type": "WordPiece", "unk_token": "[UNK]", "vocab": {"[UNK]": 0, "a": 1, "##b": 2, "[CLS]": 3, "[SEP]": 4}},
    "normalizer": {"type": "BertNormalizer", "lowercase": False},
    "pre_tokenizer": {"type": "BertPreTokenizer"},
}


def tokenizers() -> list[bytes]:
    return [json.dumps(one).encode() for one in (TOKENIZER, WITH_SPACES, BY_REGEX, UNIGRAM, PIECEWISE)]


SETTINGS = json.dumps(
    {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "a",
        "add_bos_token": True,
        "add_eos_token": False,
        "added_tokens_decoder": {"4": {"content": "<s>", "special": True}},
        "chat_template": [{"name": "default", "template": "{{ messages }}"}, {"name": "tools", "template": "x"}],
        "do_lower_case": False,
    }
).encode()


def _field(number: int, value: bytes | int | float) -> bytes:
    if isinstance(value, float):
        return bytes([number << 3 | 5]) + struct.pack("<f", value)
    tag = number << 3 | (2 if isinstance(value, bytes) else 0)
    head = bytes([tag & 127 | 128, tag >> 7]) if tag > 127 else bytes([tag])
    return head + (bytes([len(value)]) + value if isinstance(value, bytes) else bytes([value]))


def pieces() -> list[bytes]:
    """SentencePiece's model files, one for each kind."""
    made = []
    for kind in (1, 2):
        data = b"".join(
            _field(1, _field(1, text.encode()) + _field(2, -float(i)) + _field(3, type))
            for i, (text, type) in enumerate((("<unk>", 2), ("<s>", 3), ("</s>", 3), ("\u2581a", 1), ("<0x41>", 6)))
        )
        data += _field(2, _field(3, kind) + _field(40, 0) + _field(41, 1) + _field(42, 2))
        made.append(data + _field(3, _field(2, b"\0\0\0\0") + _field(3, 1) + _field(4, 0)))
    return made


RANKS = b"YQ== 0\nYg== 1\nYWI= 2\nYWJh 3\n\n4pY= 4\n"
WORDS = b"[PAD]\n[UNK]\n[CLS]\n[SEP]\na\n##b\nc\r\n"


def configs() -> list[bytes]:
    """The demo's, as it is and under every other architecture's name, with keys that some of them ask for."""
    demo = json.loads((FOLDER / "demo" / "config.json").read_bytes())
    more = {
        "num_local_experts": 4,
        "num_experts": 4,
        "moe_num_experts": 4,
        "head_dim": 16,
        "layer_types": ["full_attention", "sliding_attention"] * (demo["num_hidden_layers"] // 2 + 1),
        "sliding_window": 8,
        "attention_bias": False,
        "mlp_bias": False,
        "use_qk_norm": True,
        "scoring_func": "sigmoid",
        "logit_scale": 0.5,
        "layer_norm_eps": 1e-5,
        "partial_rotary_factor": 0.5,
        "rope_parameters": {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, "rope_theta": 1e4},
        "num_nextn_predict_layers": 0,
        "query_pre_attn_scalar": 16,
        "final_logit_softcapping": 30.0,
        "attn_logit_softcapping": 50.0,
        "num_shared_experts": 1,
    }
    made = [demo]
    made += [demo | more | {"architectures": [name]} for name in ARCHITECTURES]
    for settings in (
        {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True, "sym": False},
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"},
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {
                "group_0": {
                    "targets": ["Linear"],
                    "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True},
                }
            },
        },
    ):
        made.append(demo | {"quantization_config": settings})
    old = {"original_max_position_embeddings": 16}
    half = [1.5] * (demo["qk_rope_head_dim"] // 2)
    for name, scaling in (
        ("LlamaForCausalLM", {"type": "yarn", "factor": 4, "attention_factor": 1.1, "beta_fast": 30, "beta_slow": 2, **old}),
        ("LlamaForCausalLM", {"type": "linear", "factor": 4}),
        ("LlamaForCausalLM", {"type": "dynamic", "factor": 4}),
        ("LlamaForCausalLM", {"rope_type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 4, **old}),
        ("Phi3ForCausalLM", {"type": "longrope", "long_factor": [2.5] * 8, "short_factor": [1.5] * 8, **old}),
        ("MiniCPM3ForCausalLM", {"type": "longrope", "long_factor": half, "short_factor": half, **old}),
    ):
        plain = {key: value for key, value in more.items() if key != "rope_parameters"}
        made.append(demo | plain | {"architectures": [name], "rope_scaling": scaling, "quantization_config": None})
    made.append({"architectures": ["LlavaForConditionalGeneration"], "text_config": demo | {"model_type": "deepseek_v3"}})
    return [json.dumps(one).encode() for one in made]


_CARD = {
    "license": "other",
    "license_name": "x",
    "license_link": "https://example.com",
    "base_model": ["owner/Model-7B-Instruct-v2", "owner/other"],
    "datasets": ["a/b"],
    "tags": ["x", "y"],
    "language": ["en", "de"],
    "model_name": "A",
    "model_creator": "B",
}
CARDS = [
    b"---\n" + json.dumps(_CARD).encode() + b"\n---\nText\n",
    b"---\nlicense: mit\nlanguage:\n- no\n- en\nbase_model: a/b\ntags: &t [x]\ndate: 2020-01-01\nn: !!int 5\n"
    b"text: |\n  a\n---\n",
]
METADATA = json.dumps(
    {
        "general.name": "A",
        "general.tags": ["x"],
        "general.languages": ["en"],
        "general.base_models": [{"name": "x", "version": 3, "repo_url": "y"}],
        "general.datasets": [{"name": "d"}],
        "a.int": 5,
        "a.long": -5000000000,
        "a.float": 0.5,
        "a.flag": True,
        "a.ints": [1, 2],
        "a.flags": [True],
        "a.texts": ["x"],
    }
).encode()

SCRIPT = 'custom="\n# a\nblk\\.[0-9]+\\.ffn_(up|gate)=q8_0\n.*=Q6_K,^output\\.weight$=f32\n"\n./quantize --custom-q "$custom"\n'
RULES = [
    SCRIPT.encode(),
    b"a=q8_0,b=iq4_k_r4 # c\n\n(x,y)=f32",
]
RECIPES = [
    b"""[source]
model = 'a'
[quantize]
type = 'Q4_K_M'
rules = '''
ffn=q8_0
'''
split_max_size = '5G'
[validate]
text = 'x'
ctx = 8
""",
    b"""[source]
model = 'hf:a/b'
revision = 'main'
[convert]
mla_layout = 'ik'
[imatrix]
text = 'x'
ctx = 8
chunks = 2
[quantize]
rules = 'a=q8_0'
target_bpw = 3.5
[repack]
pattern = 'ffn'
[validate]
text = 'x'
baseline = 'bf16'
prompt = 'p'
n = 5
max_ppl_ratio = 1.5
max_kld = 0
[report]
base_model = 'a'
""",
]
TEMPLATES = [
    b"{% for m in messages %}{% if loop.first and m['role'] != 'user' %}{{ raise_exception('x') }}{% endif %}"
    b"<|{{ m.role }}|>{{ m['content'] | trim }}{% endfor %}"
    b"{% set ns = namespace(a=1) %}{% set ns.a = ns.a * 2 %}{{ ns.a | tojson }}",
    b"{%- macro f(x, y=2) -%}{{ x ~ y + '%s' % x }}{{ '{:>4}'.format(x) }}{%- endmacro -%}{{ f('a') }}{{ [1, 2] | join(',') }}"
    b"{% generation %}{{ {'a': [1, none, true]} | tojson(indent=2) }}{% endgeneration %}{{ strftime_now('%d') }}"
    b"{% for i in range(9) if i is odd recursive %}{% break %}{% else %}x{% endfor %}{{ 'a b'.replace('a', 'b').split() }}"
    b"{{ messages[1:][::-1] | map(attribute='role') | list | length }}{% filter upper %}a{% endfilter %}"
    b"{{ 'x' | indent(2) | center(9) }}{{ dict(a=1).items() | list }}{{ 2 ** 3 % 5 }}",
]
CHATS = b"""{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
{"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}
{"text": "abc"}
"abc"

[{"role": "user", "content": "a"}]
"""
MANIFEST = b"xxh64  0123456789abcdef  a.gguf:blk.0\nsha1  " + b"0" * 40 + b"  a.gguf\nsha256    " + b"F" * 64 + b"  b c\n"
_MADE = {"name": "made", "nbytes": 1, "mtime_ns": 5, "xxh3": xxhash.xxh3_64_hexdigest(b"x")}
_STAGE = {"key": "key", "seconds": 1.5, "result": {"chunks": 1}, "files": [_MADE]}
MEMORY = json.dumps({"imatrix": _STAGE, "quantize": {"key": "", "seconds": 0, "result": None, "files": []}}).encode()
MEASURED = json.dumps(
    {"key": "key", "errors": {"a": {"q8_0": 0.5}}, "divergences": {"text": {"types": [0.5, 0.25]}}}
    | {"probes": {"text": {"types": {"a": "q8_0"}}}}
).encode()
RESULT = json.dumps(
    {"perplexity": 5.5, "tokens_xxh3": "x", "n_ctx": 8, "chunks": 2, "window_losses": [1.5, 2.5], "settings": {"threads": 1}}
    | {"perplexity_error": 0.5, "about": {"files": [], "recipe": "a\nb"}, "program": {"version": "1"}}
).encode()
