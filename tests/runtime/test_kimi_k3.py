"""Kimi K3, which transformers does not have, against its definition (`kimi_k3_model`), on every backend."""

import json
from importlib.util import find_spec

import numpy as np
import pytest
from checkpoint_cases import EXACT, write_gguf
from kimi_k3_model import CONFIGS, LENGTH, KimiK3, write_checkpoint
from op_graphs import DEVICE

from ggufmill import FormatError
from ggufmill.convert import open_source
from ggufmill.quantize import gguf_source
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.models.architectures import build_graph

TOLERANCE = 2e-4  # the definition itself, in float32, is 8e-5 from float64; logits have a standard deviation of about 1


@pytest.fixture(scope="module", params=CONFIGS)
def model(request, tmp_path_factory):
    """(path of the GGUF, tokens, logits by the definition)."""
    folder, config = tmp_path_factory.mktemp("k3"), CONFIGS[request.param]
    weights = write_checkpoint(config, folder / "model")
    path, _ = write_gguf(open_source(folder / "model"), folder / "model.gguf")
    tokens = np.random.default_rng(3).integers(3, config["vocab_size"], LENGTH)
    logits = KimiK3(config, weights).logits(tokens)
    assert logits.std() > 0.3
    return path, tokens, logits


def test_the_logits_are_those_of_the_definition(model):
    path, tokens, expected = model
    loaded = load_model(path, **EXACT)
    assert np.abs(loaded.logits(tokens) - expected).max() < TOLERANCE
    session = loaded.session()
    session.feed(tokens[:7])
    for at in range(7, 20):
        assert np.abs(session.feed(tokens[at : at + 1]) - expected[at]).max() < TOLERANCE
    source = gguf_source(path)
    compiled = reference.compile_graph(build_graph(source), source)
    hidden = compiled.hidden(tokens, [(compiled.new_cache(LENGTH), LENGTH)])
    assert np.abs(compiled.logits(hidden) - expected).max() < TOLERANCE
    if find_spec("torch") is not None:
        on_torch = load_model(path, device=DEVICE, exact=True, ubatch=25, threads=1)
        assert np.abs(on_torch.logits(tokens) - expected).max() < TOLERANCE


def test_names_and_keys_are_those_of_llama_cpp(model):
    """As its loader asks for them (src/models/kimi-k3.cpp)."""
    source = gguf_source(model[0])
    assert source.architecture == "kimi-k3"
    assert source.tensors["output_res_score.weight"].shape == (64,)
    assert source.tensors["blk.1.ssm_g.weight"].shape == (64, 64)
    assert source.tensors["blk.1.ssm_a"].shape == (4,)
    is_odd = "blk.0.ssm_g.weight" not in source.tensors
    assert ("blk.2.attn_gate.weight" in source.tensors) != is_odd
    assert ("blk.3.ffn_routed_norm.weight" in source.tensors) != is_odd
    keys = {key.removeprefix("kimi-k3."): value for key, value in source.metadata.items()}
    assert keys["attn_res.block_size"] == (5 if is_odd else 2)
    assert [*keys["attention.head_count_kv"]] == ([1, 0, 0, 1, 0, 0] if is_odd else [0, 0, 1, 0, 0, 1])
    assert keys.get("kda.gate_lower_bound") == (None if is_odd else -5)
    assert (keys["activation.situ_beta"], keys["activation.situ_linear_beta"]) == (1.5, 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "silu"}, "hidden_act is 'silu'"),
        ({"mla_use_nope": False}, "mla_use_nope is False"),
        ({"num_nextn_predict_layers": 1}, "num_nextn_predict_layers is 1"),
        ({"linear_attn_config": None}, "linear_attn_config"),
        ({"attn_res_block_size": 0}, "attn_res_block_size is 0"),
    ],
)
def test_what_cannot_be_converted_is_one_line(tmp_path, change, message):
    write_checkpoint(CONFIGS["kimi-k3"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= change
    path.write_text(json.dumps(config))
    with pytest.raises(FormatError, match=message):
        open_source(tmp_path / "model")
