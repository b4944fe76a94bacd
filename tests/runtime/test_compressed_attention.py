"""DeepSeek-V4 over several runs of 128 tokens: against transformers in passes of all sizes, with several sequences in a pass,
with entries in other types; and what is refused."""

import numpy as np
import pytest
from checkpoint_cases import EXACT, TOLERANCE, convert_case, saved_model
from model_cases.common import COMMON

from ggufmill.formats import PlanError
from ggufmill.quantize import gguf_source
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference

LENGTH = 300


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return convert_case("deepseek4", tmp_path_factory.mktemp("deepseek4"))[2]


@pytest.fixture(scope="module")
def tokens():
    return np.random.default_rng(8).integers(3, COMMON["vocab_size"], LENGTH)


@pytest.fixture(scope="module")
def expected(path, tokens):
    """The logits of transformers."""
    torch, model = pytest.importorskip("torch"), saved_model("deepseek4", path.parent)
    with torch.no_grad():
        return model(torch.tensor(tokens[None])).logits[0].numpy()


@pytest.mark.parametrize("ubatch", [512, 128, 45, 7])
def test_long_texts(path, tokens, expected, ubatch):
    assert np.abs(load_model(path, ubatch=ubatch, **EXACT).logits(tokens) - expected).max() < TOLERANCE


@pytest.mark.oracle
@pytest.mark.parametrize("ubatch", [512, 45])
def test_long_texts_on_a_device(path, tokens, expected, ubatch):
    pytest.importorskip("torch")
    from op_graphs import DEVICE

    model = load_model(path, device=DEVICE, ubatch=ubatch, **EXACT)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    session = model.session()
    session.feed(tokens[:130])
    fork = session.fork(130)
    session.feed(tokens[130:140])
    for branch in (fork, session):
        start = len(branch.tokens)
        assert np.abs(branch.feed(tokens[start:280]) - expected[279]).max() < TOLERANCE


def test_the_reference_backend(path, tokens, expected):
    model = load_model(path)
    executable = reference.compile_graph(model.graph, gguf_source(path))
    cache = executable.new_cache(LENGTH)
    hidden = [executable.hidden(tokens[first : first + 75], [(cache, 75)]) for first in range(0, LENGTH, 75)]
    assert np.abs(executable.logits(np.concatenate(hidden)) - expected).max() < TOLERANCE


def test_sequences_of_one_pass(path, tokens, expected):
    """Each at another place within its runs, and every token by itself at the ends of runs."""
    model = load_model(path, **EXACT)
    lengths = (3, 127, 128, 200, 255)
    sessions = [model.session() for _ in lengths]
    model.feed([(session, tokens[:length]) for session, length in zip(sessions, lengths, strict=True)])
    for step in range(3):
        batch = [
            (session, tokens[length + step : length + step + 1]) for session, length in zip(sessions, lengths, strict=True)
        ]
        for logits, length in zip(model.feed(batch), lengths, strict=True):
            assert np.abs(logits - expected[length + step]).max() < TOLERANCE
    fork = sessions[3].fork(200)
    assert np.abs(fork.feed(tokens[200:290]) - expected[289]).max() < TOLERANCE


def test_types_of_entries(path, tokens, expected):
    apart = {}
    for kind in ("f16", "q8_0", "q4_0"):
        model = load_model(path, cache_k=kind, k_cache_hadamard=False, **EXACT)
        assert model.new_cache(1).types.split()[0] == kind
        apart[kind] = (model.logits(tokens) - expected).std()
    assert TOLERANCE / 100 < apart["f16"] < apart["q8_0"] < apart["q4_0"] < 0.5 * expected.std()
    rotated = load_model(path, cache_k="q4_0", **EXACT)
    assert all(part.rotation for layer in rotated.new_cache(1).layers for n, part in layer.rows.items() if n == "entries")
    assert (rotated.logits(tokens) - expected).std() < 2 * apart["q4_0"]  # random keys have no outliers to spread
    with pytest.raises(PlanError, match="-ctv q8_0 has no effect"):
        load_model(path, cache_v="q8_0")
