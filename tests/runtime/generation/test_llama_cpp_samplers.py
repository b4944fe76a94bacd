"""Mirostat and DRY of llama.cpp as peers, where llama-cpp-python is installed."""

import ctypes
import math

import numpy as np
import pytest

from ggufmill import convert_model
from ggufmill.recipes import FOLDER
from ggufmill.runtime import Sampler, Sampling, load_model
from ggufmill.runtime.generation.sampling import ZIPF_TOKENS, Mirostat

pytest.importorskip("llama_cpp")
from llama_cpp import llama_cpp as lib

N = 500


def applied(sampler, logits):
    """(ids, logits, probabilities, id that was selected or None) that a sampler of llama.cpp leaves."""
    data = (lib.llama_token_data * len(logits))(*(lib.llama_token_data(i, float(x), 0.0) for i, x in enumerate(logits)))
    array = lib.llama_token_data_array(data=data, size=len(logits), selected=-1, sorted=False)
    lib.llama_sampler_apply(sampler, ctypes.byref(array))
    ids = np.array([array.data[i].id for i in range(array.size)])
    left, p = (np.array([getattr(array.data[i], name) for i in range(array.size)]) for name in ("logit", "p"))
    return ids, left, p, int(ids[array.selected]) if array.selected >= 0 else None


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("exponent", [0.8, 1.4])
def test_mirostat_keeps_the_same_tokens(version, exponent):
    """Over a text, in which each token that llama.cpp draws moves both limits."""
    arguments = (N, 7, 4.0, 0.3, ZIPF_TOKENS) if version == 1 else (7, 4.0, 0.3)
    peer = (lib.llama_sampler_init_mirostat if version == 1 else lib.llama_sampler_init_mirostat_v2)(*arguments)
    ours, random, sizes = Mirostat(4.0, 0.3), np.random.default_rng(1), set()
    for _ in range(60):
        logits = (-exponent * np.log(random.permutation(np.arange(1, N + 1)))).astype(np.float32)
        p = np.exp(logits.astype(np.float64))
        p /= p.sum()
        order = np.argsort(-p)
        count = ours.count(p[order[:ZIPF_TOKENS]], N) if version == 1 else max(1, np.count_nonzero(p >= ours.least))
        ids, _, shares, chosen = applied(peer, logits)
        assert abs(len(ids) - count) <= 1  # their sums are in single precision
        assert set(ids) <= set(order[: count + 1])
        sizes.add(count)
        ours.learn(float(shares[list(ids).index(chosen)]))
    lib.llama_sampler_free(peer)
    assert len(sizes) > 10


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    path = tmp_path_factory.mktemp("demo") / "demo.gguf"
    convert_model(FOLDER / "demo", path, program="llama.cpp")
    return load_model(path)


@pytest.fixture(scope="module")
def vocabulary(model):
    lib.llama_backend_init()
    parameters = lib.llama_model_default_params()
    parameters.vocab_only = True
    peer = lib.llama_model_load_from_file(str(model.source.path).encode(), parameters)
    yield lib.llama_model_get_vocab(peer)
    lib.llama_model_free(peer)


@pytest.mark.parametrize("breakers", [(), ("\n", ":", '"', "*"), ("the", " of", "ing the")])
@pytest.mark.parametrize(("allowed", "last_n"), [(2, -1), (1, 40), (4, 200)])
def test_dry_penalties_are_the_same(model, vocabulary, breakers, allowed, last_n):
    text = (FOLDER / "demo/calibration.txt").read_text("utf-8")[:1200]
    tokens = model.tokenizer.encode(text + text[200:500] + text[100:400])
    array = (ctypes.c_char_p * max(len(breakers), 1))(*(each.encode() for each in breakers))
    n_searched = len(tokens) if last_n < 0 else last_n
    peer = lib.llama_sampler_init_dry(vocabulary, 0.8, 1.75, allowed, n_searched, array, len(breakers))
    settings = Sampling(
        dry_multiplier=0.8, dry_allowed_length=allowed, dry_penalty_last_n=last_n, dry_sequence_breakers=breakers
    )
    ours = Sampler(settings, model.tokenizer).repetition
    n_penalised = 0
    for i, token in enumerate(tokens):
        lib.llama_sampler_accept(peer, token)
        logits = np.zeros(model.tokenizer.n_vocab)
        ours.apply(logits, tokens[: i + 1])
        if i % 5:
            continue
        ids, left, *_ = applied(peer, np.zeros(model.tokenizer.n_vocab, np.float32))
        np.testing.assert_allclose(logits[ids], left, rtol=1e-5)
        n_penalised += np.count_nonzero(left)
    lib.llama_sampler_free(peer)
    assert n_penalised > 5
    assert math.isfinite(left.sum())
