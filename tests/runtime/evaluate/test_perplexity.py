import dataclasses
import json
import math

import numpy as np
import pytest
from checkpoint_cases import saved_model
from recorded_models import record_of

from ggufmill.formats import MillError, PlanError
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.perplexity import perplexity


def with_tensor(source, name, change):
    """The source with one tensor's values changed by a function of its array of rows."""
    tensor = source.tensors[name]
    per_matrix = tensor.shape[1] if len(tensor.shape) > 1 else 1
    rows = np.concatenate([tensor.read(i, i + per_matrix) for i in range(0, tensor.n_rows, per_matrix)])
    changed = change(rows.copy())
    new = dataclasses.replace(tensor, read=lambda start, stop: changed[start:stop])
    return dataclasses.replace(source, tensors=source.tensors | {name: new})


@pytest.fixture(scope="module")
def worse(tiny):
    """The same model with a little noise on one tensor."""
    noise = np.random.default_rng(1).standard_normal((48, 32)).astype(np.float32) * 0.1
    return with_tensor(tiny, "blk.0.ffn_up.weight", lambda rows: rows + noise)


def reference_scores(model, text_tokens, n_ctx, bos):
    """(losses, logits) of every scored prediction, computed in float64 one window at a time."""
    losses, logits = [], []
    for start in range(0, len(text_tokens) - n_ctx + 1, n_ctx):
        window = list(text_tokens[start : start + n_ctx])
        window[0] = bos
        scores = model.logits(window).astype(np.float64)
        for i in range(n_ctx // 2, n_ctx - 1):
            row = scores[i] - scores[i].max()
            losses.append(math.log(np.exp(row).sum()) - row[window[i + 1]])
            logits.append(scores[i])
    return np.array(losses), np.array(logits)


def test_the_second_halves_of_windows_are_scored(tiny, tokens):
    model = load_model(tiny)
    losses, _ = reference_scores(model, tokens, 20, bos=0)
    assert len(losses) == 10 * 9
    result = perplexity(model, tokens, n_ctx=20)
    assert (result.chunks, result.n_ctx, result.tokens_scored) == (10, 20, 90)
    assert result.perplexity == pytest.approx(math.exp(losses.mean()), rel=1e-5)
    error = math.sqrt((np.mean(losses**2) - losses.mean() ** 2) / (len(losses) - 1))
    assert result.error == pytest.approx(math.exp(losses.mean()) * error, rel=1e-4)
    assert result.tokens_per_second > 0


@pytest.mark.oracle
def test_it_agrees_with_torch(tmp_path, build, tokens):
    """transformers' logits and torch's cross entropy; the model has no vocabulary and therefore no BOS."""
    torch, source = pytest.importorskip("torch"), build("v3")
    record_of("v3").write(tmp_path)
    reference = saved_model("v3", tmp_path)
    losses = []
    with torch.no_grad():
        for start in range(0, 200, 50):
            window = torch.tensor(tokens[start : start + 50])
            logits = reference(window[None]).logits[0, 25:-1]
            losses.append(torch.nn.functional.cross_entropy(logits, window[26:], reduction="none"))
    expected = torch.cat(losses).mean().exp().item()
    result = perplexity(load_model(source), tokens, n_ctx=50)
    assert result.perplexity == pytest.approx(expected, rel=1e-4)
    assert result.tokens_scored == 4 * 24


def test_bos_replaces_the_first_token_of_each_window(tiny, tokens):
    changed = tokens.copy()
    changed[::20] = 7
    with_bos = load_model(tiny)
    assert perplexity(with_bos, tokens, 20).perplexity == perplexity(with_bos, changed, 20).perplexity
    without = load_model(dataclasses.replace(tiny, metadata=tiny.metadata | {"tokenizer.ggml.add_bos_token": False}))
    assert perplexity(without, tokens, 20).perplexity != perplexity(without, changed, 20).perplexity


def test_a_text_and_its_tokens_give_the_same_result(tiny):
    model, text = load_model(tiny), "One wants a text of some length here, so there it is. " * 4
    assert perplexity(model, text, 32).perplexity == perplexity(model, model.tokenizer.encode(text), 32).perplexity


def test_number_of_windows_and_intermediate_results(tiny, tokens):
    model, seen = load_model(tiny), []
    result = perplexity(model, tokens, 20, chunks=3, on_chunk=lambda so_far, total: seen.append((so_far, total)))
    assert [(so_far.chunks, total) for so_far, total in seen] == [(1, 3), (2, 3), (3, 3)]
    for i, (so_far, _) in enumerate(seen, 1):
        assert so_far.perplexity == pytest.approx(perplexity(model, tokens[: 20 * i], 20).perplexity, rel=1e-6)
    assert result.perplexity == seen[-1][0].perplexity
    assert perplexity(model, tokens, 20, chunks=99).chunks == 10


def test_a_baseline_gives_divergence_and_agreement(tiny, worse, tokens):
    model, base = load_model(worse), load_model(tiny)
    _, logits = reference_scores(model, tokens, 20, bos=0)
    base_losses, base_logits = reference_scores(base, tokens, 20, bos=0)

    def log_softmax(x):
        x = x - x.max(1, keepdims=True)
        return x - np.log(np.exp(x).sum(1, keepdims=True))

    p, q = log_softmax(base_logits), log_softmax(logits)
    divergence = (np.exp(p) * (p - q)).sum(1)
    result = perplexity(model, tokens, 20, baseline=base)
    assert divergence.mean() > 1e-4
    assert result.kld_mean == pytest.approx(divergence.mean(), rel=1e-3)
    assert result.kld_error == pytest.approx(divergence.std() / math.sqrt(len(divergence) - 1), rel=1e-3)
    assert result.kld_max == pytest.approx(divergence.max(), rel=1e-3)
    assert result.top1_agreement == pytest.approx(100 * (p.argmax(1) == q.argmax(1)).mean())
    assert 0 < result.top1_agreement < 100
    assert result.baseline_perplexity == pytest.approx(math.exp(base_losses.mean()), rel=1e-5)
    assert result.ratio == pytest.approx(result.perplexity / result.baseline_perplexity, rel=1e-6)
    same = perplexity(base, tokens, 20, baseline=base)
    assert same.top1_agreement == 100
    assert same.kld_mean == pytest.approx(0, abs=1e-9)


def test_json_keys(tiny, tokens):
    model = load_model(tiny)
    plain = perplexity(model, tokens, 20).as_json()
    assert {"perplexity", "error", "chunks", "n_ctx", "tokens_per_second"} <= plain.keys()
    assert "kld_mean" not in plain
    compared = perplexity(model, tokens, 20, baseline=model).as_json()
    assert {"kld_mean", "top1_agreement"} <= compared.keys()
    json.dumps(compared)


def test_a_single_prediction_has_no_error(tiny, tokens):
    model = load_model(tiny)
    result = perplexity(model, tokens, 4, chunks=1, baseline=model)
    assert result.tokens_scored == 1
    assert [result.error, result.kld_error, result.top1_error, result.ratio_error] == [None] * 4
    assert not {"error", "kld_error", "top1_error", "ratio_error"} & result.as_json().keys()
    assert {"perplexity", "kld_mean", "ratio"} <= result.as_json().keys()


def test_windows_beyond_the_trained_context_are_noted(tiny, tokens):
    model = load_model(tiny)  # trained with 64
    short = dataclasses.replace(tiny, metadata=tiny.metadata | {"llama.context_length": 32})
    assert perplexity(model, tokens, 64).as_json()["notes"] == []
    seen = []
    result = perplexity(model, tokens, 100, chunks=1, on_chunk=lambda so_far, _: seen.append(so_far))
    assert result.as_json()["notes"] == seen[0].notes == ["n_ctx is 100, but the model was trained with a context of 64 tokens"]
    notes = perplexity(model, tokens, 100, chunks=1, baseline=load_model(short)).notes
    assert notes[1:] == ["n_ctx is 100, but the baseline was trained with a context of 32 tokens"]


def test_overflow_gives_infinite_perplexity(tiny, tokens):
    source = with_tensor(tiny, "output.weight", lambda rows: rows * 1e4)
    assert perplexity(load_model(source), tokens, 20, chunks=1).perplexity == math.inf


def test_a_text_shorter_than_a_window_is_refused(tiny, tokens):
    with pytest.raises(PlanError, match=r"has 200 tokens, one window needs 512: .* a smaller n_ctx \(-c\)"):
        perplexity(load_model(tiny), tokens)
    with pytest.raises(PlanError, match="at least 1"):
        perplexity(load_model(tiny), tokens, 20, chunks=0)


def test_a_baseline_with_another_vocabulary_is_refused(build, tiny, tokens):
    source = build("llama")
    with pytest.raises(PlanError, match="baseline has 288 tokens in its vocabulary, the model 258"):
        perplexity(load_model(tiny), tokens, 20, baseline=load_model(source))


def insert(value, row=0):
    def change(rows):
        rows[row, 1] = value
        return rows

    return change


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("blk.0.attn_v.weight", np.nan),
        ("blk.0.ffn_down.weight", np.inf),
        ("blk.0.ffn_norm.weight", np.nan),
        ("output.weight", np.nan),
        ("token_embd.weight", np.inf),
    ],
)
def test_the_first_tensor_that_causes_nan_is_named(tiny, name, value):
    model = load_model(with_tensor(tiny, name, insert(value)))
    with pytest.raises(MillError, match=rf"first output that is not finite .* is that of {name}"):
        perplexity(model, [0] * 40, 20)
    assert model.observer is None


def test_nan_in_an_expert_is_named_with_its_index(build, tokens):
    source = build("v3")
    model = load_model(with_tensor(source, "blk.2.ffn_up_exps.weight", insert(np.nan, row=32 * 5)))
    with pytest.raises(MillError, match=r"blk\.2\.ffn_up_exps\.weight \(matrix 5\)"):
        perplexity(model, tokens, 50)
