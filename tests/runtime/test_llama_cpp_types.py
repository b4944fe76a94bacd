"""Files in the types and mixes that llama.cpp has: it loads them and computes what the runtime computes."""

import numpy as np
import pytest
from checkpoint_cases import convert_case

from ggufmill import quantize_model
from ggufmill.formats import open_gguf
from ggufmill.runtime import load_model

# File type -> the type that most of its weights have.
FILE_TYPES = {"NVFP4": "nvfp4", "MXFP4_MOE": "mxfp4", "TQ1_0": "tq1_0", "TQ2_0": "tq2_0", "Q2_0": "q2_0"}
SIZES = {"hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 256, "num_hidden_layers": 2, "head_dim": 64}
SIZES |= {"num_experts_per_tok": 6}  # all: which ones are chosen would depend on roundings
CASE = "qwen3moe"


@pytest.fixture(scope="module")
def random_model(tmp_path_factory):
    tokens, _, path = convert_case(CASE, tmp_path_factory.mktemp("model"), SIZES)
    return tokens[:24], path


@pytest.fixture
def llama_cpp(monkeypatch):
    module = pytest.importorskip("llama_cpp")
    defaults = module.llama_cpp.llama_model_default_params

    def plain():  # its re-arranged weights fault on some virtual machines
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    monkeypatch.setattr(module.llama_cpp, "llama_model_default_params", plain)
    return module


@pytest.mark.parametrize("file_type", FILE_TYPES)
def test_llama_cpp_computes_the_same(random_model, llama_cpp, tmp_path, file_type):
    tokens, model = random_model
    path = tmp_path / "out.gguf"
    quantize_model(model, path, file_type)
    types = {name: info.type.name for name, info in open_gguf(path).tensors.items()}
    assert types["blk.1.ffn_up_exps.weight"] == FILE_TYPES[file_type]
    assert ("blk.1.ffn_up_exps.scale" in types) == ("blk.1.attn_q.scale" in types) == (file_type == "NVFP4")
    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "type_k": f32, "type_v": f32, "flash_attn": False}
    peer = llama_cpp.Llama(str(path), verbose=False, **options)
    peer.eval(tokens.tolist())
    theirs, exact = np.array(peer.scores[: len(tokens)]), load_model(path, exact=True).logits(tokens)
    ours = load_model(path).logits(tokens)
    errors = [np.sqrt(((logits - exact) ** 2).mean()) / exact.std() for logits in (theirs, ours)]
    assert max(errors) < 0.03  # of activations that both round to eight bits
