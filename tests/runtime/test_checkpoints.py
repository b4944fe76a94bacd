"""Models as they lie on disk: a Hugging Face folder through the converter's source, a GGUF with quantised tensors."""

import dataclasses
import os
from pathlib import Path

import numpy as np
import pytest

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, FormatError
from ggufmill.formats.execute import execute
from ggufmill.formats.plan import Output, make_plan
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model

CASES = [("llama3", "ik"), ("v3", "ik"), ("v3", "mainline"), ("v3", "legacy"), ("v2-lite", "ik"), ("v2-groups", "mainline")]


@pytest.mark.parametrize(("kind", "layout"), CASES)
def test_a_checkpoint_gives_the_logits_of_transformers(build, tokens, tmp_path, kind, layout):
    torch = pytest.importorskip("torch")
    reference, _ = build(kind)
    reference.save_pretrained(tmp_path)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    logits = load_model(open_source(tmp_path, mla_layout=layout)).logits(tokens)
    assert np.abs(logits - expected).max() < 2e-3


def test_a_trained_model_with_its_own_tokenizer():
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    folder = Path(os.environ.get("GGUFMILL_SHARED", "")) / "data" / "story"
    if not (folder / "config.json").exists():
        pytest.skip("GGUFMILL_SHARED does not hold data/story")
    model = load_model(open_source(folder))
    text = "Once upon a time there was a little girl named Lily. She loved to play outside in the park, 3 times a day! " * 4
    reference_tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokens = reference_tokenizer(text)["input_ids"]
    assert model.tokenizer.encode(text) == tokens
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].numpy()
    assert np.abs(model.logits(tokens) - expected).max() < 2e-3


QUANTISED = {
    "token_embd.weight": "q8_0",
    "output.weight": "q8_0",
    "blk.0.attn_q.weight": "q8_0_r8",  # interleaved: rows only decode in groups of eight
    "blk.0.attn_output.weight": "iq4_nl",
    "blk.0.ffn_gate.weight": "bf16",
    "blk.0.ffn_up.weight": "q6_0",
}


def test_a_gguf_gives_the_logits_of_its_decoded_tensors(tiny, tokens, tmp_path):
    outputs, decoded = [], {}
    for name, tensor in tiny.tensors.items():
        kind, values = TYPES[QUANTISED.get(name, "f32")], tensor.read(0, tensor.n_rows)
        packed = encode(values, kind.name)
        outputs.append(Output(name, tensor.shape, "f32", kind, "test", lambda start, stop, q=packed: q[start:stop]))
        back = decode(packed, kind.name, tensor.shape[0])
        assert np.array_equal(back, values) != (name in QUANTISED)
        decoded[name] = dataclasses.replace(tensor, read=lambda start, stop, x=back: x[start:stop])
    numbers = {k: v if isinstance(v, str | bool) else np.float32(v) for k, v in tiny.metadata.items() if "tokenizer" not in k}
    vocabulary = {k: v for k, v in tiny.metadata.items() if "tokenizer" in k}
    plan = make_plan(outputs, numbers | vocabulary, tmp_path / "model.gguf")
    execute(plan, threads=1)

    model = load_model(tmp_path / "model.gguf")
    expected = load_model(dataclasses.replace(tiny, tensors=decoded)).logits(tokens)
    assert np.abs(model.logits(tokens) - expected).max() < 1e-5
    assert np.abs(load_model(str(tmp_path / "model.gguf"), cache_bytes=0).logits(tokens) - expected).max() < 1e-5
    assert np.abs(load_model(tiny).logits(tokens) - expected).max() > 1e-2
    assert model.tokenizer.decode(model.tokenizer.encode("Größe")) == "Größe"
    with pytest.raises(FormatError, match=r"other\.gguf"):
        load_model(tmp_path / "other.gguf")
