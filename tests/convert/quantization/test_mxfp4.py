"""gpt-oss with its experts in MXFP4: copied bit by bit, decoded, and the same logits as transformers either way."""

import json

import gguf
import numpy as np
import pytest
from commands import exit_code

from ggufmill.convert import open_source
from ggufmill.convert.outtype import outtype_rules
from ggufmill.formats import TYPES, FormatError, PlanError, open_gguf
from ggufmill.quantize import decode
from ggufmill.runtime import load_model

HIDDEN, INNER, EXPERTS, LAYERS, VOCABULARY = 64, 96, 4, 2, 50
VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
CONFIG = {
    "architectures": ["GptOssForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_local_experts": EXPERTS,
    "num_experts_per_tok": 2,
    "sliding_window": 8,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "attention_bias": True,
    "swiglu_limit": 7.0,
    "vocab_size": VOCABULARY,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 16,
    },
}
DOWN = "model.layers.1.mlp.experts.down_proj"
PACKED = {"quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}


def decode_mxfp4(blocks, scales):
    """float32 [experts, rows, columns], decoded as defined by OCP Microscaling Formats 1.0, lower four bits first."""
    codes = np.stack([blocks & 15, blocks >> 4], -1)
    values = np.where(codes & 8, -1, 1) * VALUES[codes & 7] * np.exp2(scales.astype(np.float32) - 127)[..., None, None]
    return values.astype(np.float32).reshape(*blocks.shape[:2], -1)


def weights():
    """Tensors of a checkpoint with MXFP4 experts, and the same with decoded experts as other checkpoints store them."""
    draw = np.random.default_rng(5)

    def noise(*shape, around=0.0, spread=None):
        return (around + (spread or shape[-1] ** -0.5) * draw.standard_normal(shape)).astype(np.float32)

    packed = {"model.embed_tokens.weight": noise(VOCABULARY, HIDDEN, spread=1.0), "lm_head.weight": noise(VOCABULARY, HIDDEN)}
    packed["model.norm.weight"] = noise(HIDDEN, around=1.0, spread=0.2)
    plain = {}
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for name, rows, columns in (("q", 128, HIDDEN), ("k", 64, HIDDEN), ("v", 64, HIDDEN), ("o", HIDDEN, 128)):
            packed[f"{layer}.self_attn.{name}_proj.weight"] = noise(rows, columns)
            packed[f"{layer}.self_attn.{name}_proj.bias"] = noise(rows, spread=0.2)
        packed[f"{layer}.self_attn.sinks"] = noise(4, spread=1.0)
        packed[f"{layer}.mlp.router.weight"] = noise(EXPERTS, HIDDEN)
        packed[f"{layer}.mlp.router.bias"] = noise(EXPERTS, spread=0.2)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            packed[f"{layer}.{norm}.weight"] = noise(HIDDEN, around=1.0, spread=0.2)
        for name, rows, columns in (("gate_up_proj", 2 * INNER, HIDDEN), ("down_proj", HIDDEN, INNER)):
            stem = f"{layer}.mlp.experts.{name}"
            blocks = draw.integers(0, 256, (EXPERTS, rows, columns // 32, 16), np.uint8)
            # Outputs of gate and up beyond 20, so that the limit of 7 has an effect.
            low = 123 if name == "gate_up_proj" else 119
            scales = draw.integers(low, low + 3, (EXPERTS, rows, columns // 32), np.uint8)
            packed |= {f"{stem}_blocks": blocks, f"{stem}_scales": scales, f"{stem}_bias": noise(EXPERTS, rows, spread=0.2)}
            plain[stem] = decode_mxfp4(blocks, scales).transpose(0, 2, 1)
    others = {name: t for name, t in packed.items() if not name.endswith(("_blocks", "_scales"))}
    return packed, others | plain


@pytest.fixture(scope="module")
def both():
    return weights()


@pytest.fixture
def checkpoints(tmp_path, write_checkpoint, both):
    """Folders of the model with MXFP4 experts, and with the same in f32."""
    packed, plain = both
    return write_checkpoint(tmp_path / "packed", CONFIG | PACKED, packed), write_checkpoint(tmp_path / "plain", CONFIG, plain)


def convert(folder, path, *options):
    assert exit_code("convert", folder, path, *options) == 0
    return open_gguf(path)


def expert_rows(tensor, first, stop):
    rows = tensor.shape[1]
    return np.concatenate([tensor.read(e * rows + first, e * rows + stop) for e in range(EXPERTS)])


def test_packed_and_decoded_experts_give_the_same_tensors(checkpoints, both):
    packed, plain = (open_source(folder) for folder in checkpoints)
    assert list(packed.tensors) == list(plain.tensors)
    assert repr(packed.metadata | {"general.name": ""}) == repr(plain.metadata | {"general.name": ""})  # some are arrays
    for name, tensor in packed.tensors.items():
        other = plain.tensors[name]
        assert tensor.shape == other.shape
        if "_exps.weight" not in name:
            continue
        assert (tensor.source_type, other.source_type) == ("mxfp4", "f32")
        for first, stop in ((0, tensor.shape[1]), (3, 17)):
            values = expert_rows(tensor, first, stop)
            assert np.array_equal(values, expert_rows(other, first, stop))
        assert np.array_equal(decode(tensor.raw(3, 17), "mxfp4", tensor.shape[0]), tensor.read(3, 17))
        assert other.raw(3, 17).tobytes() == other.read(3, 17).tobytes()
    gate, up = (packed.tensors[f"blk.1.ffn_{part}_exps.weight"] for part in ("gate", "up"))
    fused = both[1]["model.layers.1.mlp.experts.gate_up_proj"].transpose(0, 2, 1).reshape(-1, HIDDEN)
    assert np.array_equal(expert_rows(gate, 0, INNER), fused[::2])
    assert np.array_equal(expert_rows(up, 0, INNER), fused[1::2])
    bias = both[1]["model.layers.1.mlp.experts.gate_up_proj_bias"]
    assert packed.tensors["blk.1.ffn_gate_exps.bias"].shape == (INNER, EXPERTS)
    assert np.array_equal(packed.tensors["blk.1.ffn_gate_exps.bias"].read(0, EXPERTS), bias[:, ::2])
    assert np.array_equal(packed.tensors["blk.1.ffn_up_exps.bias"].read(1, 3), bias[1:3, 1::2])
    down = both[1]["model.layers.0.mlp.experts.down_proj_bias"]
    assert np.array_equal(packed.tensors["blk.0.ffn_down_exps.bias"].read(0, EXPERTS), down)


def test_the_gguf_package_decodes_the_bytes(checkpoints):
    tensor = open_source(checkpoints[0]).tensors["blk.0.ffn_down_exps.weight"]
    values = gguf.quants.dequantize(tensor.raw(0, HIDDEN), gguf.GGMLQuantizationType.MXFP4)
    assert np.array_equal(values, tensor.read(0, HIDDEN))


@pytest.mark.parametrize("experts", ["packed", "plain"])
def test_logits_are_those_of_transformers(checkpoints, both, experts):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**CONFIG, attn_implementation="eager")).float().eval()
    model.load_state_dict({name: torch.tensor(t) for name, t in both[1].items()})
    gate_inputs = []
    model.model.layers[0].mlp.experts._apply_gate = lambda x, f=model.model.layers[0].mlp.experts._apply_gate: (
        gate_inputs.append(x.abs().max().item()) or f(x)
    )
    tokens = np.random.default_rng(6).integers(0, VOCABULARY, 60)
    with torch.no_grad():
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    assert max(gate_inputs) > 12  # well beyond the limit
    source = open_source(checkpoints[experts == "plain"])
    logits = load_model(source, exact=True, cache_k="f32", cache_v="f32").logits(tokens)
    assert np.abs(logits - expected).max() < 1e-4
    # With activations in eight bits a token near a tie of the router may go to another expert, so each token is judged.
    rounded = load_model(source).logits(tokens)
    assert np.mean((rounded - expected).std(axis=1) < 0.03 * expected.std()) >= 0.95


def test_decoded_values_are_those_of_transformers(both):
    torch, mxfp4 = pytest.importorskip("torch"), pytest.importorskip("transformers.integrations.mxfp4")
    packed, plain = both
    for name in ("model.layers.0.mlp.experts.down_proj", "model.layers.1.mlp.experts.gate_up_proj"):
        blocks, scales = (torch.tensor(packed[f"{name}_{part}"]) for part in ("blocks", "scales"))
        theirs = mxfp4.convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
        assert np.array_equal(theirs.numpy(), plain[name])


# --outtype -> type of the experts, of the other matrices
@pytest.mark.parametrize(
    ("outtype", "experts", "others"), [("auto", "mxfp4", "bf16"), ("mxfp4", "mxfp4", "bf16"), ("bf16", "bf16", "bf16")]
)
def test_outtypes(checkpoints, tmp_path, outtype, experts, others):
    source = open_source(checkpoints[0])
    file = convert(checkpoints[0], tmp_path / "out.gguf", "--outtype", outtype)
    assert list(file.tensors) == list(source.tensors)
    for name, tensor in file.tensors.items():
        if name.endswith("_exps.weight"):
            assert tensor.type.name == experts
            values = np.concatenate([expert_rows(source.tensors[name], 0, tensor.shape[1])])
            assert np.array_equal(decode(tensor.data, experts, tensor.shape[0]), values)  # bf16 holds them exactly, too
            if experts == "mxfp4":
                assert np.array_equal(tensor.data[5:9], source.tensors[name].raw(5, 9))
        elif name.endswith("weight") and len(tensor.shape) == 2 and "ffn_gate_inp" not in name:
            assert tensor.type.name == others
        else:
            assert tensor.type.name == "f32"


def test_float_experts_to_mxfp4(checkpoints, tmp_path):
    file = convert(checkpoints[1], tmp_path / "out.gguf", "--outtype", "mxfp4")
    packed = open_source(checkpoints[0])
    for name in (f"blk.{i}.ffn_{part}_exps.weight" for i in range(LAYERS) for part in ("gate", "up", "down")):
        tensor = file.tensors[name]
        assert tensor.type.name == "mxfp4"
        assert np.array_equal(
            decode(tensor.data, "mxfp4", tensor.shape[0]), expert_rows(packed.tensors[name], 0, tensor.shape[1])
        )
    assert exit_code("convert", checkpoints[1], tmp_path / "auto.gguf") == 0
    assert open_gguf(tmp_path / "auto.gguf").tensors["blk.0.ffn_up_exps.weight"].type.name == "bf16"


def test_mxfp4_without_experts_is_refused(tmp_path, tiny_llama, write_checkpoint):
    folder = write_checkpoint(tmp_path / "dense", *tiny_llama())
    with pytest.raises(PlanError, match="dense has no experts, which are what outtype mxfp4 writes in mxfp4; choose another"):
        outtype_rules(open_source(folder), "mxfp4")


def test_auto_is_f16_only_if_all_float_weights_are(checkpoints, tmp_path, write_checkpoint, both):
    half = {name: t.astype(np.float16) if t.dtype == np.float32 else t for name, t in both[0].items()}
    source = open_source(write_checkpoint(tmp_path / "half", CONFIG | PACKED, half))
    default, rules = outtype_rules(source, "auto")
    assert (default.name, len(rules), {rule.type.name for rule in rules}) == ("f16", 3 * LAYERS, {"mxfp4"})
    assert outtype_rules(open_source(checkpoints[0]), "auto")[0].name == "bf16"
    assert outtype_rules(source, "q8_0") == (TYPES["q8_0"], [])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t, c: t.pop(f"{DOWN}_scales"), f"1 tensors are missing: {DOWN}_scales"),
        (lambda t, c: t.pop(f"{DOWN}_blocks"), f"1 tensors are missing: {DOWN}_blocks"),
        (lambda t, c: c.update(intermediate_size=64), r"gate_up_proj_blocks is \[4, 192, 2, 16\], not \[4, 128, 2, 16\]"),
        (lambda t, c: c.update(intermediate_size=80), "mxfp4 experts of 64 x 80 cannot be: blocks have 32 columns"),
        (lambda t, c: c.update(swiglu_limit=-5.0), "swiglu_limit"),
        (lambda t, c: c.update(layer_types=["full_attention"]), r"layer_types is \['full_attention'\]"),
        (lambda t, c: c["quantization_config"].update(quant_method="mxfp8"), "quant_method 'mxfp8'"),
        (lambda t, c: c.pop("quantization_config"), "tensors are missing: model.layers.0.mlp.experts.gate_up_proj"),
    ],
)  # fmt: skip
def test_checkpoints_that_are_refused(tmp_path, write_checkpoint, both, change, message):
    tensors, config = dict(both[0]), json.loads(json.dumps(CONFIG | PACKED))
    change(tensors, config)
    with pytest.raises(FormatError, match=message):
        open_source(write_checkpoint(tmp_path / "bad", config, tensors))


def test_scales_that_do_not_fit(tmp_path, write_checkpoint, both):
    tensors = dict(both[0])
    name = "model.layers.0.mlp.experts.down_proj_scales"
    tensors[name] = tensors[name][:, :, :2]
    with pytest.raises(FormatError, match=r"scales of shape \[4, 64, 2\]"):
        open_source(write_checkpoint(tmp_path / "short", CONFIG | PACKED, tensors))
    tensors[name] = both[0][name].astype(np.float32)
    with pytest.raises(FormatError, match="mxfp4 blocks and scales are U8"):
        open_source(write_checkpoint(tmp_path / "float", CONFIG | PACKED, tensors))


def test_bf16_is_copied(tmp_path, write_checkpoint, both):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    tensors = {name: t.astype(ml_dtypes.bfloat16) for name, t in both[1].items()}
    source = open_source(write_checkpoint(tmp_path / "bf16", CONFIG, tensors))
    tensor = source.tensors["blk.0.ffn_down_exps.weight"]
    assert (tensor.source_type, tensor.stored.name) == ("bf16", "bf16")
    stored = tensors["model.layers.0.mlp.experts.down_proj"][2].T
    assert tensor.raw(2 * HIDDEN + 7, 2 * HIDDEN + 40).tobytes() == np.ascontiguousarray(stored[7:40]).tobytes()
    assert np.array_equal(tensor.read(2 * HIDDEN + 7, 2 * HIDDEN + 40), stored[7:40].astype(np.float32))
