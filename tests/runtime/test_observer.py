"""What an observer sees: every linear tensor, with the activations that really went into it."""

import numpy as np
import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime import load_model


@pytest.fixture
def observed(input_recorder):
    """(model, tokens) -> logits; (name, matrix) -> all activations [n, columns] that were reported."""

    def run(model, tokens):
        inputs = input_recorder()
        with model.observing(inputs):
            logits = model.logits(tokens)
        return logits, {key: np.concatenate(parts) for key, parts in inputs.seen.items()}

    return run


def weights(source, name):
    tensor = source.tensors[name]
    per_matrix = tensor.shape[1]
    parts = [tensor.read(row, row + per_matrix) for row in range(0, tensor.n_rows, per_matrix)]
    return np.concatenate(parts).reshape(*tensor.shape[::-1])


LATENT = {f"blk.{layer}.attn_{part}.weight" for layer in range(3) for part in ("kv_b", "k_b", "v_b")}


@pytest.mark.parametrize("mla", [0, 1, 2, 3])
@pytest.mark.parametrize("layout", ["ik", "mainline", "legacy"])
def test_every_linear_tensor_is_reported_with_its_rows(build, tokens, observed, layout, mla):
    source = build("v3", layout)
    plain = load_model(source, mla=mla).logits(tokens)
    logits, seen = observed(load_model(source, mla=mla, ubatch=64), tokens)
    assert np.abs(logits - plain).max() < 1e-4

    n, heads, used, n_expert = len(tokens), 4, 2, 8
    linear = {name for name, t in source.tensors.items() if len(t.shape) > 1 and name != "token_embd.weight"}
    assert {name for name, _ in seen} == linear | LATENT  # those of other layouts too
    for name in LATENT - linear:
        rows = {m: len(x) for (at, m), x in seen.items() if at == name}
        assert rows == ({0: n} if "kv_b" in name else dict.fromkeys(range(heads), n))
    for name in linear:
        shape, rows = source.tensors[name].shape, {m: len(x) for (at, m), x in seen.items() if at == name}
        if "_exps" in name:
            assert set(rows) == set(range(n_expert))
            assert sum(rows.values()) == n * used
        elif "_k_b" in name or "_v_b" in name:
            assert rows == (dict.fromkeys(range(heads), n) if len(shape) == 3 else {0: n * heads})
        else:
            assert rows == {0: n}
        assert all(x.shape[1] == shape[0] for (at, _), x in seen.items() if at == name)


@pytest.mark.parametrize("layout", ["ik", "mainline"])
@pytest.mark.parametrize("mla", [0, 1, 2, 3])
def test_the_inputs_of_k_b_and_v_b_are_right(build, tokens, observed, layout, mla):
    """k_b takes what q_b gives (its part without rotation), and what v_b makes of its input goes into attn_output."""
    tokens = tokens[:50]
    source = build("v3", layout)
    _, seen = observed(load_model(source, mla=mla, exact=True), tokens)
    n, heads, nope, rope, rank, v = len(tokens), 4, 32, 16, 32, 32
    for layer in range(3):
        prefix = f"blk.{layer}.attn_"

        def inputs(part, width, prefix=prefix):
            name = f"{prefix}{part}.weight"
            if layout == "ik":
                return seen[name, 0].reshape(heads, n, width)
            return np.stack([seen[name, head] for head in range(heads)])

        q = (seen[f"{prefix}q_b.weight", 0] @ weights(source, f"{prefix}q_b.weight").T).reshape(n, heads, nope + rope)
        assert np.abs(inputs("k_b", nope) - q[:, :, :nope].transpose(1, 0, 2)).max() < 1e-4
        v_b = weights(source, f"{prefix}v_b.weight").reshape(heads, v, rank)
        mixed = np.einsum("hnr,hvr->nhv", inputs("v_b", rank), v_b).reshape(n, heads * v)
        assert np.abs(seen[f"{prefix}output.weight", 0] - mixed).max() < 1e-4
        if layout == "ik":
            latents = seen[f"{prefix}kv_b.weight", 0]
            assert np.abs(inputs("v_b", rank)[:, 0] - latents[0]).max() < 1e-5  # the first token only sees itself


def test_what_v_b_sees_needs_a_cache_that_is_made_for_it(build, tokens, input_recorder):
    model = load_model(build("v3", "ik"), mla=0)
    cache = model.new_cache(len(tokens))
    model.observer = input_recorder()
    with pytest.raises(PlanError, match="with -mla 0 an observer has to be set before the cache is made"):
        model.hidden([(cache, tokens)])


def test_cached_tokens_are_reported_once(build, tokens, observed):
    source = build("v3")
    _, whole = observed(load_model(source), tokens)
    _, parts = observed(load_model(source, ubatch=30), tokens)
    assert whole.keys() == parts.keys()
    for key, rows in whole.items():
        name, matrix = key
        assert rows.shape == parts[key].shape, key
        sums, again = (rows.astype(float) ** 2).sum(0), (parts[key].astype(float) ** 2).sum(0)
        assert np.abs(sums - again).max() <= 1e-4 * sums.max(), (name, matrix)


def test_a_llama_reports_its_linear_tensors(tiny, observed):
    _, seen = observed(load_model(tiny), range(20))
    linear = {name for name, t in tiny.tensors.items() if len(t.shape) > 1 and name != "token_embd.weight"}
    assert {name for name, _ in seen} == linear
    assert all(matrix == 0 and len(x) == 20 for (_, matrix), x in seen.items())
