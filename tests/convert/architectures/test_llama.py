import gguf
import ml_dtypes
import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import FormatError


def read_all(tensor):
    """All rows of a source tensor, read matrix by matrix as `execute` does, with the outermost dimension first."""
    rows = tensor.shape[1] if len(tensor.shape) > 1 else 1
    matrices = [tensor.read(start, start + rows) for start in range(0, tensor.n_rows, rows)]
    return np.concatenate(matrices).reshape(tensor.shape[::-1])


@pytest.fixture
def convert(tmp_path, write_checkpoint, tiny_llama):
    """convert(dtype, changes of config.json) -> (source, config, tensors) of a tiny Llama."""

    def run(dtype=np.float32, **changes):
        config, tensors = tiny_llama(dtype, **changes)
        return open_source(write_checkpoint(tmp_path / "tiny", config, tensors, vocab=False)), config, tensors

    return run


def rotate_halves(x, angle):
    """The rotary embedding of one head in Hugging Face's order: first half with second half."""
    a, b = np.split(x, 2)
    return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])


def rotate_pairs(x, angle):
    """The same in the order of GGUF's llama: neighbouring elements."""
    a, b = x[::2], x[1::2]
    return np.stack([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)], 1).reshape(-1)


def test_metadata(convert):
    source, _, _ = convert()
    expected = {
        "general.architecture": "llama",
        "general.type": "model",
        "general.name": "tiny",
        "general.size_label": "18K",
        "llama.block_count": np.uint32(2),
        "llama.context_length": np.uint32(256),
        "llama.embedding_length": np.uint32(32),
        "llama.feed_forward_length": np.uint32(48),
        "llama.attention.head_count": np.uint32(4),
        "llama.attention.head_count_kv": np.uint32(2),
        "llama.attention.layer_norm_rms_epsilon": np.float32(1e-5),
        "llama.rope.freq_base": np.float32(500000),
        "llama.rope.dimension_count": np.uint32(8),
        "llama.vocab_size": np.uint32(40),
        "tokenizer.ggml.model": "no_vocab",
    }
    assert source.metadata == expected
    assert {k: type(v) for k, v in source.metadata.items()} == {k: type(v) for k, v in expected.items()}
    assert source.notes == [
        "there is no tokenizer.json: the GGUF will have no vocabulary, without which no program can run it on text"
    ]


def test_names_and_order(convert):
    source, _, tensors = convert()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 2)
    assert set(source.tensors) == {names.get_name(n, (".weight",)) for n in tensors}
    order = list(source.tensors)
    assert order[0] == "token_embd.weight"
    assert order[-2:] == ["output_norm.weight", "output.weight"]
    blocks = [int(n.split(".")[1]) for n in order if n.startswith("blk.")]
    assert blocks == sorted(blocks)


def test_unchanged_weights(convert):
    source, _, tensors = convert(ml_dtypes.bfloat16)
    for name, origin in (("token_embd", "model.embed_tokens"), ("blk.1.ffn_down", "model.layers.1.mlp.down_proj")):
        tensor, array = source.tensors[f"{name}.weight"], tensors[f"{origin}.weight"]
        assert tensor.shape == array.shape[::-1]
        assert np.array_equal(read_all(tensor), array.astype(np.float32))
        assert np.array_equal(tensor.read(3, 7), array[3:7].astype(np.float32))
        assert (tensor.source_type, tensor.stored.name) == ("bf16", "bf16")
        assert tensor.raw(2, 5).tobytes() == array[2:5].tobytes()
    norm = source.tensors["blk.0.ffn_norm.weight"]
    assert norm.shape == (32,)
    assert np.array_equal(norm.read(0, 1)[0], tensors["model.layers.0.post_attention_layernorm.weight"].astype(np.float32))


@pytest.mark.parametrize(("name", "origin", "heads"), [("attn_q", "q_proj", 4), ("attn_k", "k_proj", 2)])
def test_permuted_heads(convert, name, origin, heads):
    source, _, tensors = convert(attention_bias=True)
    weight, bias = source.tensors[f"blk.1.{name}.weight"], source.tensors[f"blk.1.{name}.bias"]
    x = np.random.default_rng(3).standard_normal(32).astype(np.float32)
    theirs = tensors[f"model.layers.1.self_attn.{origin}.weight"] @ x + tensors[f"model.layers.1.self_attn.{origin}.bias"]
    ours = read_all(weight) @ x + read_all(bias)
    angle = 7.0 * 500000.0 ** -(np.arange(0, 8, 2) / 8)
    for head in range(heads):
        a = rotate_halves(theirs[head * 8 : head * 8 + 8], angle)
        b = rotate_pairs(ours[head * 8 : head * 8 + 8], angle)
        assert np.allclose(a.reshape(2, 4).T.reshape(-1), b, atol=1e-5)
    rows = weight.read(5, 11)
    assert np.array_equal(rows, read_all(weight)[5:11])
    assert np.array_equal(weight.raw(5, 11).view(np.float32), rows)
    assert bias.raw is None


def test_biases(convert):
    source, _, tensors = convert(attention_bias=True, mlp_bias=True)
    assert np.array_equal(read_all(source.tensors["blk.0.attn_output.bias"]), tensors["model.layers.0.self_attn.o_proj.bias"])
    assert np.array_equal(read_all(source.tensors["blk.0.ffn_up.bias"]), tensors["model.layers.0.mlp.up_proj.bias"])
    assert len(source.tensors) == len(tensors)


def test_head_dim(convert):
    source, _, _ = convert(head_dim=6)
    for key in ("attention.key_length", "attention.value_length", "rope.dimension_count"):
        assert source.metadata[f"llama.{key}"] == np.uint32(6)
    assert source.tensors["blk.0.attn_q.weight"].shape == (32, 24)


def test_tied_embeddings(tmp_path, write_checkpoint, tiny_llama):
    config, tensors = tiny_llama(tie_word_embeddings=True)
    embedding = tensors["model.embed_tokens.weight"]
    for names in (("model.embed_tokens.weight",), ("lm_head.weight",), ("model.embed_tokens.weight", "lm_head.weight")):
        tensors = {n: a for n, a in tensors.items() if a is not embedding} | dict.fromkeys(names, embedding)
        source = open_source(write_checkpoint(tmp_path / "tiny", config, tensors))
        assert "output.weight" not in source.tensors
        assert np.array_equal(read_all(source.tensors["token_embd.weight"]), embedding)
        assert any("tied" in note for note in source.notes) == (len(names) == 2)


LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 500000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}},
    ],
)
def test_llama3_scaling(convert, changes):
    source, _, _ = convert(hidden_size=512, **changes)
    factors = source.tensors["rope_freqs.weight"]
    values = factors.read(0, 1)[0]
    assert factors.shape == (64,)
    assert values.dtype == np.float32
    # Llama 3.1: 1 for short wavelengths, 8 for long ones, linear in 1 / wavelength between them
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(64) / 64)
    assert (values[wavelength < 8192 / 4] == 1).all()
    assert np.allclose(values[wavelength > 8192], 8)
    between = (wavelength > 8192 / 4) & (wavelength < 8192)
    smooth = (8192 / wavelength[between] - 1) / 3
    assert between.sum() >= 3
    assert np.allclose(1 / values[between], (1 - smooth) / 8 + smooth)
    assert not any("rope.scaling" in key for key in source.metadata)


def test_llama3_scaling_with_equal_factors_is_a_step(convert):
    """Llama 4 Scout: no frequency lies between the two, so each pair is either unchanged or divided."""
    scaling = {"rope_type": "llama3", **LLAMA3, "factor": 16.0, "high_freq_factor": 1.0}
    source, _, _ = convert(hidden_size=512, rope_theta=500000.0, rope_scaling=scaling)
    wavelength = 2 * np.pi * 500000.0 ** (np.arange(64) / 64)
    assert np.array_equal(source.tensors["rope_freqs.weight"].read(0, 1)[0], np.where(wavelength > 8192, 16, 1))


def test_llama3_scaling_against_transformers(convert):
    rope_utils = pytest.importorskip("transformers.modeling_rope_utils")
    transformers = pytest.importorskip("transformers")
    scaling = {"rope_type": "llama3", "rope_theta": 500000.0, **LLAMA3}
    config = transformers.LlamaConfig(hidden_size=512, num_attention_heads=4, rope_parameters=scaling)
    theirs, _ = rope_utils.ROPE_INIT_FUNCTIONS["llama3"](config, device="cpu")
    source, _, _ = convert(hidden_size=512, rope_scaling={"rope_type": "llama3", **LLAMA3})
    plain = 500000.0 ** -(np.arange(0, 128, 2) / 128)
    assert np.allclose(plain / source.tensors["rope_freqs.weight"].read(0, 1)[0], theirs.numpy(), rtol=1e-5)


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_other_scalings(convert, key):
    source, _, _ = convert(rope_scaling={key: "linear", "factor": 4})
    assert source.metadata["llama.rope.scaling.type"] == "linear"
    assert source.metadata["llama.rope.scaling.factor"] == np.float32(4)
    yarn = {key: "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "beta_fast": 24}
    source, _, _ = convert(rope_scaling=yarn)
    keys = {k.removeprefix("llama.rope.scaling."): v for k, v in source.metadata.items() if "rope.scaling" in k}
    expected = {"type": "yarn", "factor": 16.0, "original_context_length": 64, "yarn_beta_fast": 24.0}
    assert keys == expected
    assert isinstance(keys["original_context_length"], np.uint32)
    with pytest.raises(FormatError, match="dynamic rotary scaling.*--allow-lossy-config"):
        convert(rope_scaling={key: "dynamic", "factor": 2.0})
    with pytest.raises(FormatError, match="type 'unknown' cannot be converted; known are default, linear"):
        convert(rope_scaling={key: "unknown", "factor": 2.0})


def test_mistral(convert):
    source, _, _ = convert(architectures=["MistralForCausalLM"], sliding_window=64)
    assert source.architecture == "llama"
    assert any("sliding window of 64" in note for note in source.notes)
    source, _, _ = convert(architectures=["MistralForCausalLM"], sliding_window=None)
    assert not any("sliding window" in note for note in source.notes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu': this activation cannot be converted"),
        ({"rms_norm_eps": None}, "the key rms_norm_eps is missing"),
        ({"intermediate_size": 48.5}, "intermediate_size is 48.5; a whole number"),
        ({"vocab_size": True}, "vocab_size is True"),
        ({"rope_theta": "10000"}, "rope_theta is '10000'; a number"),
        ({"mlp_bias": 1}, "mlp_bias is 1; true or false"),
        ({"num_key_value_heads": 3, "head_dim": 8}, "4 heads over 3 key-value heads"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "the key original_max_position_embeddings is missing"),
        ({"rope_scaling": {"rope_type": "linear"}}, "the key factor is missing"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "not one set of settings"),
        ({"num_hidden_layers": 2**31 - 1}, "num_hidden_layers is 2147483647, more than the 21 tensors that are stored"),
        ({"head_dim": 2**31 - 2}, r"q_proj.weight is \[32, 32\], not"),
        ({"head_dim": 2**31 - 2, "rope_scaling": {"rope_type": "llama3", **LLAMA3}}, r"q_proj.weight is \[32, 32\], not"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan; a number above 0 that fits float32 is needed"),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps is inf"),
        ({"rms_norm_eps": 0}, "rms_norm_eps is 0;"),
        ({"rms_norm_eps": 1e-60}, "rms_norm_eps is 1e-60"),
        ({"rms_norm_eps": -1e-5}, "rms_norm_eps is -1e-05"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps is 10000"),
        ({"rope_theta": 0}, "rope_theta is 0;"),
        ({"rope_theta": -10000.0}, "rope_theta is -10000.0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -1}}, "rope_theta is -1"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "factor is 0;"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "factor": -8.0}}, "factor is -8.0"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "original_max_position_embeddings": -1}}, "embeddings is -1"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": float("nan")}}, "low_freq_factor is nan"),
        ({"rope_scaling": {"rope_type": "llama3", **LLAMA3, "low_freq_factor": 8}}, "low_freq_factor is 8.0, above high_freq"),
        ({"rope_scaling": "yarn"}, "rope_scaling or rope_parameters is not one set"),
        ({"rope_scaling": 5}, "rope_scaling or rope_parameters is not one set"),
        ({"rope_scaling": ["yarn"]}, "rope_scaling or rope_parameters is not one set"),
        ({"rope_scaling": {"rope_type": ["yarn"]}}, r"type \['yarn'\] cannot be converted"),
        ({"rope_scaling": {"rope_type": 5}}, r"type 5 cannot be converted"),
    ],
)
def test_configs_that_cannot_be_converted(tmp_path, write_checkpoint, tiny_llama, changes, message):
    config, tensors = tiny_llama()
    with pytest.raises(FormatError, match=message):
        open_source(write_checkpoint(tmp_path / "tiny", config | changes, tensors))


def test_checkpoint_saved_by_transformers(tmp_path):
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    config = transformers.LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    )
    model = transformers.LlamaForCausalLM(config).to(torch.float16)
    model.save_pretrained(tmp_path / "saved")
    source = open_source(tmp_path / "saved")
    assert np.array_equal(read_all(source.tensors["output.weight"]), model.lm_head.weight.detach().float().numpy())
    assert source.tensors["output.weight"].source_type == "f16"
    assert source.metadata["llama.rope.freq_base"] == np.float32(10000)
