"""Models that transformers does not have, against their definitions (`kimi_k3_model`, `openpangu_model`), on every backend."""

import json
from importlib.util import find_spec

import kimi_k3_model
import numpy as np
import openpangu_model
import pytest
from checkpoint_cases import EXACT, file_differences, save_tokenizer, write_gguf
from op_graphs import DEVICE
from safetensors.numpy import load_file, save_file

from ggufmill import FormatError, PlanError, convert_model, export_model, quantize_model
from ggufmill.convert import open_source
from ggufmill.imatrix.collect import CollectOptions, entry_shapes
from ggufmill.quantize import gguf_source
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.models.architectures import build_graph
from ggufmill.runtime.placement.compute_buffers import Use
from ggufmill.runtime.placement.memory import cache_token_bytes

TOLERANCE = 2e-4  # Kimi K3's definition itself, in float32, is 8e-5 from float64; logits have a standard deviation of about 1
LENGTH = 60
# case -> (what writes a checkpoint, the definition, config)
CASES = {case: (kimi_k3_model.write_checkpoint, kimi_k3_model.KimiK3, c) for case, c in kimi_k3_model.CONFIGS.items()}
CASES |= {case: (openpangu_model.write_checkpoint, openpangu_model.OpenPangu, c) for case, c in openpangu_model.CONFIGS.items()}


@pytest.fixture(scope="module", params=CASES)
def model(request, tmp_path_factory):
    """(case, path of the GGUF, tokens, logits by the definition)."""
    folder, (write, definition, config) = tmp_path_factory.mktemp(request.param), CASES[request.param]
    weights = write(config, folder / "model")
    path, _ = write_gguf(open_source(folder / "model"), folder / "model.gguf")
    tokens = np.random.default_rng(3).integers(3, config["vocab_size"], LENGTH)
    logits = definition(config, weights).logits(tokens)
    assert logits.std() > 0.3
    return request.param, path, tokens, logits


@pytest.mark.filterwarnings("ignore:.*has no code of its own for SinkAttention")
def test_the_logits_are_those_of_the_definition(model):
    _, path, tokens, expected = model
    loaded = load_model(path, **EXACT)
    assert np.abs(loaded.logits(tokens) - expected).max() < TOLERANCE
    session = loaded.session()
    session.feed(tokens[:7])
    for at in range(7, 40):
        assert np.abs(session.feed(tokens[at : at + 1]) - expected[at]).max() < TOLERANCE
    fork = session.fork()
    session.rewind(25)
    assert np.abs(session.feed(tokens[25:30]) - expected[29]).max() < TOLERANCE
    assert np.abs(fork.feed(tokens[40:50]) - expected[49]).max() < TOLERANCE
    source = gguf_source(path)
    compiled = reference.compile_graph(build_graph(source), source)
    hidden = compiled.hidden(tokens, [(compiled.new_cache(LENGTH), LENGTH)])
    assert np.abs(compiled.logits(hidden) - expected).max() < TOLERANCE
    if find_spec("torch") is not None:
        on_torch = load_model(path, device=DEVICE, exact=True, ubatch=25, threads=1)
        assert np.abs(on_torch.logits(tokens) - expected).max() < TOLERANCE


def test_names_and_keys_are_those_of_llama_cpp_and_ik_llama_cpp(model):
    """As their loaders ask for them (llama.cpp's src/models/kimi-k3.cpp, ik_llama.cpp's create_openpangu_tensors)."""
    case, path, *_ = model
    source, is_odd = gguf_source(path), case.endswith("-odd")
    shapes = {name: tensor.shape for name, tensor in source.tensors.items()}
    keys = {key.removeprefix(f"{source.architecture}."): np.ravel(v).tolist() for key, v in source.metadata.items()}
    if case.startswith("openpangu"):
        assert source.architecture == "openpangu"
        streams = 3 if is_odd else 4
        assert shapes["blk.0.attn_mhc_phi.weight"] == (64 * streams, (streams + 2) * streams)
        assert shapes["merge_mhc_alpha"] == (1,)
        assert shapes["blk.3.attn_compresskv_conv.weight"] == (3, 32)
        assert shapes["blk.3.attn_k_b.weight"] == (24, 4 * 32)
        assert shapes["blk.3.attn_indexer_weights_proj.weight"] == (64, 16)
        assert "blk.2.attn_indexer_k.weight" not in shapes
        assert ("blk.1.block_post_norm.weight" in shapes) != is_odd
        assert keys["swa_layers"] == ([2] if is_odd else [0, 2])
        assert keys["sliding_window_list"] == ([9] if is_odd else [15, 15])
        return
    assert source.architecture == "kimi-k3"
    assert shapes["output_res_score.weight"] == (64,)
    assert shapes["blk.1.ssm_g.weight"] == (64, 64)
    assert shapes["blk.1.ssm_a"] == (4,)
    assert ("blk.2.attn_gate.weight" in shapes) != is_odd
    assert ("blk.3.ffn_routed_norm.weight" in shapes) != is_odd
    assert keys["attn_res.block_size"] == [5 if is_odd else 2]
    assert keys["attention.head_count_kv"] == ([1, 0, 0, 1, 0, 0] if is_odd else [0, 0, 1, 0, 0, 1])
    assert keys.get("kda.gate_lower_bound") == (None if is_odd else [-5])
    assert (keys["activation.situ_beta"], keys["activation.situ_linear_beta"]) == ([1.5], [2])


def test_importance_is_collected_for_every_matrix_of_a_layer(model):
    loaded = load_model(model[1], **EXACT)
    planned = quantize_model(model[1], model[1].with_suffix(".q8"), "q8_0", dry_run=True).as_json()["tensors"]
    wanted = {one["name"] for one in planned if one["name"].startswith("blk.") and one["type"] != "f32"}
    assert {name for name in wanted if name not in entry_shapes(loaded, CollectOptions())} == set()
    assert len(wanted) > 40


def test_what_a_token_takes_is_counted(model):
    """Also where the reference function of an op keeps it."""
    source, session = gguf_source(model[1]), load_model(model[1], threads=1).session()
    session.feed(model[2])
    cache = session.cache
    kept = sum(rows.nbytes for rows in cache.history.rows.values()) / LENGTH
    kept += sum(part.token_bytes for layer in cache.layers for part in layer.rows.values())
    use, names = Use(n_ctx=LENGTH), source.tensors.keys()
    layers = range(int(source.metadata[f"{source.architecture}.block_count"]))
    said = sum(cache_token_bytes(source.metadata, use, layer, names) for layer in layers)
    assert kept <= said < 1.3 * kept  # rows are filled up to whole vectors
    if source.architecture == "openpangu":
        for settings in ({"cache_k": "q8_0"}, {"cache_v": "f16"}):
            with pytest.raises(PlanError, match="has no effect: latents of this architecture are cached as f32 alone"):
                load_model(model[1], **settings)


@pytest.mark.slow(keep=["kimi-k3", "openpangu"])
@pytest.mark.parametrize("case", CASES)
def test_the_model_comes_back(tmp_path, case):
    """Of weights that the conversion multiplied the product comes back, beside ones."""
    write, definition, config = CASES[case]
    weights, tokens = write(config, tmp_path / "model"), np.arange(3, 40)
    save_tokenizer(tmp_path / "model" / "tokenizer.json")
    convert_model(tmp_path / "model", tmp_path / "first.gguf", outtype="f32")
    result = export_model(tmp_path / "first.gguf", tmp_path / "exported")
    assert (result.lost, result.architecture) == ([], config["architectures"][0])
    convert_model(result.folder, tmp_path / "second.gguf", outtype="f32")
    assert file_differences(tmp_path / "first.gguf", tmp_path / "second.gguf") == []
    exported, found = load_file(result.folder / "model.safetensors"), json.loads((result.folder / "config.json").read_text())
    assert {*exported} == {*weights}
    again = config | {key: found[key] for key in config if key in found}
    if "linear_attn_config" in config:
        again["linear_attn_config"] = {"gate_lower_bound": None} | found["linear_attn_config"]
    expected = definition(config, weights).logits(tokens)
    assert np.abs(definition(again, exported).logits(tokens) - expected).max() < 1e-5


def test_experts_of_four_bits_keep_their_blocks(tmp_path):
    """As Kimi K3 is published: compressed-tensors' mxfp4, named within the text model's settings or beside them."""
    config = kimi_k3_model.TEXT | {"moe_intermediate_size": 64}
    kimi_k3_model.write_checkpoint(config, tmp_path / "model")
    path, random, stored = tmp_path / "model" / "model.safetensors", np.random.default_rng(0), {}
    for name, values in load_file(path).items():
        if ".experts." in name:
            rows, columns = values.shape
            stored[f"{name}_packed"] = random.integers(0, 256, (rows, columns // 2), dtype=np.uint8)
            stored[f"{name}_scale"] = random.integers(118, 124, (rows, columns // 32), dtype=np.uint8)
        else:
            stored[name] = values
    save_file(stored, path)
    weights = {"group_size": 32, "num_bits": 4, "strategy": "group", "symmetric": True, "type": "float", "dynamic": False}
    method = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized", "ignore": ["lm_head"]}
    method["config_groups"] = {"group_0": {"targets": ["Linear"], "weights": weights, "format": "mxfp4-pack-quantized"}}
    outer = json.loads((tmp_path / "model" / "config.json").read_text())
    for changed in (outer | {"quantization_config": method}, outer | {"text_config": config | {"quantization_config": method}}):
        (tmp_path / "model" / "config.json").write_text(json.dumps(changed))
        tensor = open_source(tmp_path / "model").tensors["blk.1.ffn_up_exps.weight"]
        assert tensor.stored is not None
        assert (tensor.stored.name, tensor.shape) == ("mxfp4", (32, 64, 8))


@pytest.mark.parametrize(
    ("case", "change", "message"),
    [
        ("kimi-k3", {"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ("kimi-k3", {"mla_use_nope": False}, "mla_use_nope is False"),
        ("kimi-k3", {"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ("kimi-k3", {"linear_attn_config": None}, "linear_attn_config"),
        ("kimi-k3", {"attn_res_block_size": 0}, "attn_res_block_size is 0"),
        ("openpangu", {"use_mhc": False}, "use_mhc is False"),
        ("openpangu", {"router_sliding_window": 4}, "router_sliding_window is 4"),
        ("openpangu", {"sliding_window_list": [15]}, "lists of one length are needed"),
        ("openpangu", {"sliding_window_list": [15, 16, 40]}, "one size above 0 for all layers is needed"),
        ("openpangu", {"block_post_layernorm_idx": 3}, "block_post_layernorm_idx is 3; a list"),
        ("openpangu", {"dsa_layers": [1]}, "dsa_layers and swa_layers are not all of 4 layers"),
    ],
)
def test_what_cannot_be_converted_is_one_line(tmp_path, case, change, message):
    write, _, config = CASES[case]
    write(config, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    whole = json.loads(path.read_text())
    whole.get("text_config", whole).update(change)
    path.write_text(json.dumps(whole))
    with pytest.raises(FormatError, match=message):
        open_source(tmp_path / "model")
