"""Checkpoints as transformers saves them, through convert and a GGUF file into the runtime: transformers' logits come out."""

import dataclasses
import re

import numpy as np
import pytest
from checkpoint_cases import EXACT, LENGTH, TOLERANCE, convert_case, new_config, oracle, write_gguf
from draft_cases import with_draft_block
from model_cases import BEYOND_LLAMA_CPP, CASES, COARSE_IN_LLAMA_CPP, IN_LLAMA_CPP
from model_cases.common import COMMON

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import ARCHITECTURES
from ggufmill.formats import FormatError
from ggufmill.quantize import gguf_source
from ggufmill.runtime import ARCHITECTURES as RUNNABLE
from ggufmill.runtime import load_model


@pytest.mark.oracle
@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_the_logits_of_transformers(tmp_path, case):
    tokens, expected, path = convert_case(case, tmp_path)
    model = load_model(path, **EXACT)
    logits = model.logits(tokens)
    difference = np.abs(logits - expected).max()
    print(f"largest difference {difference:.1e}, standard deviation {expected.std():.2f}")
    assert expected.std() > 0.3  # otherwise the tolerance would say nothing
    assert difference < TOLERANCE
    with_draft = load_model(with_draft_block(gguf_source(path)), **EXACT)  # which is never run as a layer of the model
    assert np.abs(with_draft.logits(tokens[:12]) - expected[:12]).max() < TOLERANCE
    assert with_draft.n_layers == model.n_layers
    session = model.session()
    session.feed(tokens[:5])
    for i in range(5, LENGTH):
        assert np.abs(session.feed(tokens[i : i + 1]) - expected[i]).max() < TOLERANCE


@pytest.mark.oracle
@pytest.mark.parametrize("case", [case for case in CASES if case not in BEYOND_LLAMA_CPP])
def test_llama_cpp_computes_the_same(tmp_path, monkeypatch, case):
    """So names and keys are those that it reads, as far as it knows the architecture."""
    llama_cpp = pytest.importorskip("llama_cpp")
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain():  # its re-arranged weights fault on some virtual machines
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain)
    tokens, expected, path = convert_case(case, tmp_path, IN_LLAMA_CPP.get(case))
    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 128, "n_threads": 1, "logits_all": True, "type_k": f32, "type_v": f32, "flash_attn": False}
    peer = llama_cpp.Llama(str(path), verbose=False, **options)
    peer.eval(tokens.tolist())
    assert np.abs(np.array(peer.scores[:LENGTH]) - expected).max() < COARSE_IN_LLAMA_CPP.get(case, TOLERANCE)


@pytest.mark.oracle
@pytest.mark.parametrize("family", {family: None for family, *_ in CASES.values()})
def test_missing_and_unknown_tensors_are_refused(tmp_path, family):
    _, transformers = oracle()
    safetensors = pytest.importorskip("safetensors.numpy")
    options = next(options for name, options, *_ in CASES.values() if name == family)
    architecture, config = new_config(transformers, family, COMMON | options)
    architecture(config).save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    open_source(tmp_path)
    parts = ("down", ".w2.", "c_proj", "output_linear", "4h_to_h.weight", "fc2.weight", "out_proj", "o_proj")
    last = [name for name in tensors if re.search(r"\b(layers|h|blocks)\.2\.", name) and any(part in name for part in parts)]
    gone = next(name for name in last if not name.endswith("experts.down_proj"))  # a stack may be there one by one
    del tensors[gone]
    prefix = gone.partition("layers.2.")[0] if "layers.2." in gone else "model."
    added = {f"{prefix}layers.{at}.strange.weight": np.zeros((2, 2), np.float32) for at in (0, 9)}
    safetensors.save_file(tensors | added, tmp_path / "model.safetensors")
    with pytest.raises(FormatError) as error:
        open_source(tmp_path)
    name = gone.removeprefix("language_model.").removeprefix("transformer.")
    assert re.search(rf"1 tensors are missing: (transformer\.)?{name};", str(error.value))
    unknown = ", ".join(name.removeprefix("language_model.") for name in added)
    assert f"2 tensors are unknown to this architecture: {unknown}" in str(error.value)


def test_every_architecture_is_tried():
    """Each that convert knows is in CASES, under the name that transformers has for it, and its graph can be run."""
    tried = {name for family, *_ in CASES.values() for name in (family, f"{family}ForCausalLM") if name in ARCHITECTURES}
    others = {
        "Gemma3ForConditionalGeneration",
        "Gemma3nForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "ExaoneForCausalLM",
        "BailingMoeForCausalLM",
    }  # below
    others |= {name for name, function in ARCHITECTURES.items() if function == "multimodal.text_model"}
    others |= {"Ernie4_5_ForCausalLM"}  # another spelling of Ernie4_5ForCausalLM
    others |= {"LFM2ForCausalLM"}  # another spelling of Lfm2ForCausalLM
    others |= {name for name in ARCHITECTURES if name.endswith("TextModel")}  # in test_multimodal
    others |= {"BailingMoeV2ForCausalLM", "ExaoneMoEForCausalLM"}  # below, and another spelling of ExaoneMoeForCausalLM
    others |= {"InternLM3ForCausalLM"}  # a Llama, whose class transformers takes: below
    others |= {"Step3p5ForCausalLM", "MiniMaxM3SparseForCausalLM", "MiniMaxM3VLForCausalLM"}  # other spellings
    others -= tried
    others |= {"PhiMoEForCausalLM", "OLMoForCausalLM"}  # other spellings
    others |= {"MPTForCausalLM", "ChatGLMForConditionalGeneration", "BaiChuanForCausalLM"}  # other spellings
    others |= {"ChatGLMModel", "BaichuanForCausalLM"}  # in test_fused_attention
    others |= {name for name, function in ARCHITECTURES.items() if function.startswith("encoders.")}  # in test_encoders
    others |= {"Qwen3Model"}  # there, too
    assert set(ARCHITECTURES) - tried == others
    assert len(RUNNABLE) >= 8


QUANTISED = {
    "token_embd.weight": "q8_0",
    "output.weight": "q8_0",
    "blk.0.attn_q.weight": "q8_0_r8",  # interleaved: rows only decode in groups of eight
    "blk.0.attn_output.weight": "iq4_nl",
    "blk.0.ffn_gate.weight": "bf16",
    "blk.0.ffn_up.weight": "q6_0",
}


def test_a_gguf_gives_the_logits_of_its_decoded_tensors(tiny, tokens, tmp_path):
    numbers = {k: v if isinstance(v, str | bool) else np.float32(v) for k, v in tiny.metadata.items() if "tokenizer" not in k}
    vocabulary = {k: v for k, v in tiny.metadata.items() if "tokenizer" in k}
    tiny = dataclasses.replace(tiny, metadata=numbers | vocabulary)
    path, held = write_gguf(tiny, tmp_path / "model.gguf", QUANTISED)
    model = load_model(path, **EXACT)
    expected = load_model(held, **EXACT).logits(tokens)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    assert np.abs(load_model(str(path), cache_bytes=0, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    assert np.abs(load_model(tiny, **EXACT).logits(tokens) - expected).max() > 1e-2
    apart = load_model(path).logits(tokens) - expected  # with activations of eight bits
    assert TOLERANCE < apart.std() < 0.01 * expected.std()
    assert model.tokenizer.decode(model.tokenizer.encode("Größe")) == "Größe"
    with pytest.raises(FormatError, match=r"other\.gguf"):
        load_model(tmp_path / "other.gguf")
