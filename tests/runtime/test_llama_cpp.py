"""Mainline llama.cpp as a peer: it loads what we write, and computes the same (the `peer` extra; skipped without it)."""

import json
import shutil

import numpy as np
import pytest
from commands import exit_code

from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

llama_cpp = pytest.importorskip("llama_cpp")

TEXT = "Return a list of the names in the current scope. If the argument is a module, its attributes.\n\n    >>> dir()\n"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A random Llama whose logits have a clear maximum, with the demo's vocabulary."""
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    folder = tmp_path_factory.mktemp("llama")
    config = transformers.LlamaConfig(
        vocab_size=1536,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
    )
    model = transformers.LlamaForCausalLM(config)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, p in model.named_parameters():
            spread = 3.0 if name.startswith("lm_head") else 1.0
            if p.dim() == 2:
                p.copy_(torch.randn(p.shape, generator=generator) * spread / p.shape[1] ** 0.5)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(FOLDER / "demo" / name, folder)
    config_path = folder / "config.json"
    config_path.write_text(json.dumps(json.loads(config_path.read_text()) | {"bos_token_id": 0, "eos_token_id": 1}))
    return folder


@pytest.fixture
def open_peer(monkeypatch):
    """Opens a GGUF in llama.cpp, without its re-arranged weights: its AMX code faults on some virtual machines."""
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain():
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain)
    return lambda path, **options: llama_cpp.Llama(str(path), n_ctx=256, n_threads=2, verbose=False, **options)


# type -> share of the logits' spread that llama.cpp's 8-bit activations may change
@pytest.mark.parametrize(("kind", "noise"), [("f32", 0.001), ("q8_0", 0.03), ("q6_K", 0.03), ("q4_K", 0.03)])
def test_llama_cpp_loads_it_and_agrees(checkpoint, tmp_path, open_peer, kind, noise):
    path = tmp_path / "model.gguf"
    assert exit_code("quantize", checkpoint, path, "--custom-q", f".*={kind}") == 0
    peer = open_peer(path, logits_all=True)
    ours = load_model(path, exact=True)

    tokens = ours.tokenizer.encode(TEXT)
    assert peer.tokenize(TEXT.encode(), add_bos=True) == tokens
    peer.eval(tokens)
    theirs = np.array(peer.scores[: len(tokens)])
    logits = ours.logits(tokens)
    apart = logits - theirs
    assert logits.std() > 2
    assert apart.std() < noise * logits.std()

    top = np.sort(logits, axis=1)
    clear = top[:, -1] - top[:, -2] > 6 * apart.std()
    assert clear.sum() > len(tokens) // 3
    assert (logits.argmax(1) == theirs.argmax(1))[clear].all()


def test_greedy_text_is_the_same(checkpoint, tmp_path, open_peer):
    path = tmp_path / "model.gguf"
    assert exit_code("convert", checkpoint, path, "--outtype", "f32") == 0
    peer = open_peer(path)
    ours = load_model(path)
    prompt = ours.tokenizer.encode(TEXT)
    session, mine, token = ours.session(256), [], None
    for _ in range(24):
        token = int(session.feed(prompt if token is None else [token]).argmax())
        mine.append(token)
    theirs = []
    for token in peer.generate(prompt, temp=0.0, top_k=1, repeat_penalty=1.0):
        theirs.append(token)
        if len(theirs) == len(mine):
            break
    assert theirs == mine
