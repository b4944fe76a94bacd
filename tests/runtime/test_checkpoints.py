"""Checkpoints as transformers saves them, through convert and a GGUF file into the runtime: transformers' logits come out."""

import dataclasses
import json
import re
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
from checkpoint_cases import EXACT, LENGTH, TOLERANCE, convert_case, convert_record, write_gguf
from draft_cases import with_draft_block
from model_cases import BEYOND_LLAMA_CPP, CASES, COARSE_IN_LLAMA_CPP, IN_LLAMA_CPP
from op_graphs import DEVICE, PLACEMENTS
from recorded_models import KEPT, KEPT_COLUMNS, features, kept_cases, kept_or_oracle, record_of
from safetensors.numpy import save_file

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import ARCHITECTURES
from ggufmill.formats import FormatError
from ggufmill.quantize import gguf_source
from ggufmill.runtime import ARCHITECTURES as RUNNABLE
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.backends.cpu.pass_tasks import PassTasks
from ggufmill.runtime.models.architectures import build_graph

CACHES = {  # cases that go through a text token by token: one of each kind of cache and of what looks back
    *("llama", "gemma3", "gpt-oss", "v3", "deepseek32", "deepseek4", "longcat-flash", "minimax-m3-odd", "llama4"),
    *("qwen35", "mamba", "falcon-h1", "lfm2", "kimi-linear"),
}
# Ops that are functions of Python in a generated token's pass: look-ups in tables, and what is before and after all layers.
IN_PYTHON = {"Embedding", "NgramEmbedding", "ExpandStreams", "MergeStreams"}
# Farther from float64 in float32 than others, in another order of the sums: the logits of transformers by 5e-5, ours by 1e-4;
# those of transformers by 1e-4 on a processor without AVX-512, ours by 3e-5.
TOLERANCES = {"qwen35moe": 2e-4, "gemma3n-odd": 2e-4}


@pytest.mark.parametrize("case", kept_or_oracle(CASES))
def test_a_checkpoint_gives_the_logits_of_transformers(tmp_path, case, monkeypatch):
    """On each backend: the whole text at once, and in pieces that follow each other in one cache. Cases
    that are not kept have no op nor variant of their own: there the reference runs it at once, torch all on a device."""
    record, path = convert_record(case, tmp_path)
    assert record.logits.std() > 0.3  # otherwise the tolerance would say nothing
    functions = functions_of_generated_tokens(monkeypatch)
    on_cpu(case, record, path)
    assert "Embedding" in functions <= IN_PYTHON
    on_reference(case, record, path)
    if find_spec("torch") is not None:
        on_torch(case, record, path)


def functions_of_generated_tokens(monkeypatch):
    """The ops for which passes of generated tokens stop, for a function of Python, as they are written."""
    found, call = set(), PassTasks.call

    def noted(self, function):
        if self.gemv:
            found.update(type(op).__name__ for op in self.ops)
        call(self, function)

    monkeypatch.setattr(PassTasks, "call", noted)
    return found


def on_cpu(case, record, path):
    model, tolerance = load_model(path, **EXACT), TOLERANCES.get(case, TOLERANCE)
    difference = record.difference(model.logits(record.tokens))
    print(f"largest difference {difference:.1e}, standard deviation {record.logits.std():.2f}")
    assert difference < tolerance
    with_draft = load_model(with_draft_block(gguf_source(path)), **EXACT)  # which is never run as a layer of the model
    assert record.difference(with_draft.logits(record.tokens[:12]), slice(12)) < tolerance
    assert with_draft.n_layers == model.n_layers
    session, single = model.session(), {*range(5, 9), 40, 41, LENGTH - 2, LENGTH - 1}
    ends = [5, *(i + 1 for i in range(5, LENGTH) if case in CACHES or i in single or i + 1 in single)]
    for start, end in pairwise([0, *ends]):
        assert record.difference(session.feed(record.tokens[start:end]), end - 1) < tolerance


def on_reference(case, record, path):
    source, tolerance = gguf_source(path), TOLERANCES.get(case, TOLERANCE)
    model = reference.compile_graph(build_graph(source), source)

    def logits(batch):
        runs = [(cache, len(tokens)) for cache, tokens in batch]
        hidden = model.hidden(np.concatenate([tokens for _, tokens in batch]), runs)
        return np.split(model.logits(hidden), np.cumsum([len(tokens) for _, tokens in batch])[:-1])

    (whole,) = logits([(model.new_cache(LENGTH), record.tokens)])
    assert record.difference(whole) < tolerance
    if case not in kept_cases():
        return
    caches, length = [model.new_cache(LENGTH) for _ in range(3)], 1 if case in CACHES else 10
    for i in range(0, LENGTH // 3, length):  # three sequences, of which each pass takes 1, 2 and 3 times as many tokens
        runs = [slice(j * i, j * (i + length)) for j in (1, 2, 3)]
        results = logits([(cache, record.tokens[run]) for cache, run in zip(caches, runs, strict=True)])
        for run, result in zip(runs, results, strict=True):
            assert record.difference(result, run) < tolerance


def on_torch(case, record, path):
    names, tolerance = list(PLACEMENTS), TOLERANCES.get(case, TOLERANCE)
    for name in names if case in CACHES else ("all", names[1 + len(case) % 3]) if case in kept_cases() else ("all",):
        model = load_model(path, device=DEVICE, exact=True, ubatch=50, threads=1, **PLACEMENTS[name])
        assert record.difference(model.logits(record.tokens)) < tolerance, name
        sessions, tokens = [model.session() for _ in range(2)], record.tokens
        model.feed([(sessions[0], tokens[:5]), (sessions[1], tokens[:7])])
        for i in range(5):
            found = model.feed([(sessions[0], tokens[5 + i : 6 + i]), (sessions[1], tokens[7 + i : 8 + i])])
            assert record.difference(found, [5 + i, 7 + i]) < tolerance, name


@pytest.mark.oracle
def test_kept_records_cover_every_op_and_variant():
    everything = set().union(*map(features, CASES))
    assert everything - set().union(*map(features, kept_cases())) == set()


@pytest.mark.oracle
@pytest.mark.parametrize("case", kept_cases())
def test_kept_records_are_what_transformers_gives(case):
    with np.load(KEPT / f"{case}.npz") as kept:
        record = record_of(case)
        assert json.loads(str(kept["table"])) == record.table
        assert kept["tokens"].tolist() == record.tokens.tolist()
        assert np.abs(kept["logits"] - record.logits[:, KEPT_COLUMNS]).max() < TOLERANCE


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


def _text_name(name):
    """As the text model alone has it."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.")


@pytest.mark.parametrize("case", kept_or_oracle({family: case for case, (family, *_) in reversed(CASES.items())}.values()))
def test_missing_and_unknown_tensors_are_refused(tmp_path, case):
    record = record_of(case)
    record.write(tmp_path)
    tensors = record.tensors()
    open_source(tmp_path)
    parts = ("down", ".w2.", "c_proj", "output_linear", "4h_to_h.weight", "fc2.weight", "out_proj", "o_proj")
    last = [name for name in tensors if re.search(r"\b(layers|h|blocks)\.2\.", name) and any(part in name for part in parts)]
    gone = next(name for name in last if not name.endswith("experts.down_proj"))  # a stack may be there one by one
    del tensors[gone]
    prefix = gone.partition("layers.2.")[0] if "layers.2." in gone else "model."
    added = {f"{prefix}layers.{at}.strange.weight": np.zeros((2, 2), np.float32) for at in (0, 9)}
    save_file(tensors | added, tmp_path / "model.safetensors")
    with pytest.raises(FormatError) as error:
        open_source(tmp_path)
    name = _text_name(gone).removeprefix("transformer.")
    assert re.search(rf"1 tensors are missing: (transformer\.)?{name};", str(error.value))
    unknown = ", ".join(map(_text_name, added))
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
    others |= {"BailingMoeV3ForCausalLM"}  # as published, in test_ling3
    others |= {"OpenPanguV2ForCausalLM"}  # in test_definitions
    others |= {"MuseGlimmerForCausalLM"}  # the text model of MuseGlimmerForConditionalGeneration
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
