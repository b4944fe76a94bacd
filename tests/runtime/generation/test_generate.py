import copy
import dataclasses
from itertools import pairwise

import numpy as np
import pytest

from ggufmill.formats import MillError, PlanError
from ggufmill.formats.metadata_values import UNUSED
from ggufmill.runtime import Sampler, Sampling, generate, load_model


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny)


def fixed(tiny, order):
    """A model that always generates order[a] after token a: its layers add nothing, its embeddings are almost orthogonal."""
    n = tiny.tensors["token_embd.weight"].n_rows
    directions = np.random.default_rng(0).standard_normal((n, 32)).astype(np.float32)
    directions /= np.linalg.norm(directions, axis=1, keepdims=True)
    head = np.zeros((n, 32), np.float32)
    for token, following in order.items():
        head[following] += 50 * directions[token]
    arrays = {"token_embd.weight": directions, "output.weight": head}
    arrays |= {name: np.zeros((32, tiny.tensors[name].shape[0]), np.float32) for name in ("blk.0.attn_output.weight",)}
    arrays |= {"blk.0.ffn_down.weight": np.zeros((32, 48), np.float32)}
    tensors = {
        name: dataclasses.replace(tiny.tensors[name], read=lambda start, stop, array=array: array[start:stop])
        for name, array in arrays.items()
    }
    return load_model(dataclasses.replace(tiny, tensors=tiny.tensors | tensors))


def chain(text, *, end=True):
    """Transitions that make a model recite the bytes of a text (no byte twice) after BOS."""
    ids = [0, *[2 + b for b in text.encode()], *([1] if end else [])]
    assert len(set(ids)) == len(ids)
    return dict(pairwise(ids))


def test_the_same_seed_gives_the_same_text(model):
    settings = {"n_predict": 40, "temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "ignore_eos": True}
    first = generate(model, "Once", seed=7, **settings)
    text = first.text()
    assert len(first.tokens) == 40
    assert generate(model, "Once", seed=7, **settings).text() == text
    others = {generate(model, "Once", seed=seed, **settings).text() for seed in range(8, 12)}
    assert text not in others
    assert len(others) == 4


def test_greedy_follows_the_logits(model):
    generation = generate(model, [0, 5, 6], n_predict=5, temp=0, ignore_eos=True)
    generation.text()
    tokens = [0, 5, 6]
    for _ in range(5):
        tokens.append(int(model.logits(tokens)[-1].argmax()))
    assert generation.tokens == tokens[3:]
    assert generation.reason == "length"
    assert generation.timings.prompt_tokens == 3
    assert (generation.timings.generated_tokens, generation.timings.generated_passes) == (5, 4)


def test_the_first_token_needs_no_pass(model):
    """Its logits are those of the prompt: without a pass there is no speed."""
    generation = generate(model, [0, 5, 6], n_predict=1, temp=0, ignore_eos=True)
    generation.text()
    assert generation.timings.generated_tokens == 1
    assert generation.timings.generated_per_second == 0


def test_pieces_are_whole_characters_and_eos_ends_the_text(tiny):
    generation = generate(fixed(tiny, chain("aé🙂ж!")), [0], temp=0)
    assert list(generation) == ["a", "é", "🙂", "ж", "!"]
    assert generation.reason == "eos"
    assert 1 not in generation.tokens
    assert generation.timings.generated_tokens == 10


def test_an_incomplete_character_is_replaced(tiny):
    generation = generate(fixed(tiny, chain("aé", end=False)), [0], n_predict=2, temp=0)
    assert list(generation) == ["a", "�"]


def test_eos_can_be_ignored(tiny):
    generation = generate(fixed(tiny, chain("ab") | {1: 2 + ord("c")}), [0], n_predict=4, temp=0, ignore_eos=True)
    assert generation.text() == "abc"
    assert generation.tokens[2] == 1


def test_stop_texts_end_it_and_are_not_returned(tiny):
    model = fixed(tiny, chain("Hi.User:x"))
    generation = generate(model, [0], temp=0, stop=["User:", "never"])
    pieces = list(generation)
    assert "".join(pieces) == "Hi."
    assert generation.reason == "stop"
    generation = generate(model, [0], temp=0, stop=["User;"])
    assert generation.text() == "Hi.User:x"  # the beginning of a stop text, withheld at first


def test_a_full_context_ends_the_generation(model):
    session = model.session(10)
    generation = generate(model, [0, 3, 4], n_predict=-1, temp=0, ignore_eos=True, session=session)
    generation.text()
    assert generation.reason == "context"
    assert len(session.tokens) == 10
    assert len(generation.tokens) == 8  # the last one was sampled with a full context, and does not fit into it
    with pytest.raises(MillError, match=r"context is full.*; choose a larger n_ctx \(-c\)"):
        generate(model, [0] * 11, session=model.session(10)).text()


def test_a_common_prefix_is_not_computed_again(model):
    session, begin = model.session(), [0, *range(5, 15)]
    first = generate(model, [*begin, 15, 16], n_predict=3, temp=0, ignore_eos=True, session=session)
    first.text()
    again = generate(model, [*begin, 20], n_predict=3, temp=0, ignore_eos=True, session=session)
    again.text()
    assert again.timings.prompt_tokens == 1
    fresh = generate(model, [*begin, 20], n_predict=3, temp=0, ignore_eos=True)
    fresh.text()
    assert again.tokens == fresh.tokens
    repeated = generate(model, [*begin, 20], n_predict=3, temp=0, ignore_eos=True, session=session)
    repeated.text()
    assert repeated.timings.prompt_tokens == 1  # the last token is needed for its logits
    assert repeated.tokens == fresh.tokens


def test_control_tokens_in_a_prompt_are_recognised(model):
    assert generate(model, "<s>A</s>").prompt == [0, 0, 2 + ord("A"), 1]


def test_invalid_arguments_are_refused(model):
    with pytest.raises(PlanError, match="prompt is empty"):
        generate(model, [])
    with pytest.raises(PlanError, match="temp = -1"):
        generate(model, "a", temp=-1)
    with pytest.raises(PlanError, match="^unknown sampling setting: 'heat'$"):
        generate(model, "a", heat=1)


def test_nan_weights_are_reported(tiny):
    broken = np.full((48, 32), np.nan, np.float32)
    tensor = dataclasses.replace(tiny.tensors["blk.0.ffn_gate.weight"], read=lambda start, stop: broken[start:stop])
    model = load_model(dataclasses.replace(tiny, tensors=tiny.tensors | {"blk.0.ffn_gate.weight": tensor}))
    with pytest.raises(MillError, match=r"blk\.0\.ffn_gate\.weight"):
        generate(model, "a").text()


LOGITS = np.log(np.array([0.05, 0.4, 0.2, 0.3, 0.05], np.float32))


def frequencies(n=4000, logits=LOGITS, past=(), **settings):
    neutral = {"temp": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": 1}
    sampler = Sampler(Sampling(**(neutral | settings)))
    return np.bincount([sampler.sample(logits, past) for _ in range(n)], minlength=len(logits)) / n


def test_frequencies_of_sampled_tokens_are_their_probabilities():
    assert np.abs(frequencies() - np.exp(LOGITS)).max() < 0.03
    hot = np.exp(LOGITS / 2)
    assert np.abs(frequencies(temp=2.0) - hot / hot.sum()).max() < 0.03


def test_tokens_that_the_filters_keep():
    assert set(np.flatnonzero(frequencies(top_k=2))) == {1, 3}
    assert set(np.flatnonzero(frequencies(top_p=0.65))) == {1, 3}
    assert set(np.flatnonzero(frequencies(top_p=0.71))) == {1, 2, 3}
    assert set(np.flatnonzero(frequencies(min_p=0.45))) == {1, 2, 3}
    assert set(np.flatnonzero(frequencies(top_k=1))) == {1}
    assert set(np.flatnonzero(frequencies(temp=0))) == {1}


def test_padding_is_never_sampled(model):
    """Ids that no tokenizer has, for which the model has rows all the same."""
    tokenizer = copy.copy(model.tokenizer)
    tokenizer.vocabulary = vocabulary = copy.copy(model.tokenizer.vocabulary)
    vocabulary.__dict__.pop("padding", None)
    last = len(vocabulary.tokens) - 1
    vocabulary.tokens = [*vocabulary.tokens[:-1], f"[PAD{last}]"]
    vocabulary.token_types = np.where(np.arange(last + 1) == last, UNUSED, vocabulary.token_types)
    assert vocabulary.padding.tolist() == [last]
    logits = np.zeros(last + 1, np.float32)
    logits[last] = 100
    for settings in (
        {"temp": 0},
        {"temp": 1.0, "seed": 1},
        {"mirostat": 2, "seed": 1},
        {"samplers": ["temperature"], "seed": 1},
    ):
        sampler = Sampler(Sampling(**settings), tokenizer)
        assert last not in {sampler.sample(logits, []) for _ in range(20)}, settings


def test_the_repeat_penalty_considers_the_last_tokens():
    logits = np.array([2.0, 1.9, -1.0], np.float32)
    greedy = {"temp": 0, "repeat_penalty": 1.5}
    assert frequencies(1, logits, past=[1, 2], **greedy)[0] == 1
    assert frequencies(1, logits, past=[0], **greedy)[1] == 1
    assert frequencies(1, logits, past=[0, 2, 2], repeat_last_n=2, **greedy)[0] == 1
    negative = np.array([-1.0, -1.2, -9.0], np.float32)
    assert frequencies(1, negative, past=[0], **greedy)[1] == 1  # a negative logit is made more negative


def test_presence_and_frequency_penalties():
    logits = np.array([2.0, 1.9, 1.5], np.float32)
    assert frequencies(1, logits, past=[0], temp=0, presence_penalty=0.2)[1] == 1
    assert frequencies(1, logits, past=[0, 1], temp=0, presence_penalty=0.2)[0] == 1
    assert frequencies(1, logits, past=[0, 0, 1], temp=0, frequency_penalty=0.15)[1] == 1  # 1.7, 1.75, 1.5
    assert frequencies(1, logits, past=[0, 0, 0, 1, 1], temp=0, frequency_penalty=0.25)[2] == 1
    assert frequencies(1, logits, past=[0, *[2] * 80], temp=0, repeat_last_n=-1, presence_penalty=0.2)[1] == 1


def kept_by_definition(logits, top_k, top_p, min_p):
    """llama.cpp's filters, one after the other on the sorted vocabulary."""
    ids = np.lexsort((np.arange(len(logits)), -logits))
    ids = ids[: top_k or None]
    p = np.exp(logits[ids] - logits[ids[0]])
    if top_p < 1:
        share, keep = 0.0, 0
        while keep < len(ids) and share < top_p * p.sum():
            share += p[keep]
            keep += 1
        ids, p = ids[:keep], p[:keep]
    return set(ids[p >= min_p].tolist())


@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 8.0])
def test_partially_sorted_filters_keep_what_the_definition_keeps(scale):
    random = np.random.default_rng(3)
    logits = (scale * random.standard_normal(3000)).round(2)  # rounded, so that many are equal
    for top_k in (0, 1, 40, 2999, 5000):
        for top_p in (1.0, 0.95, 0.5, 1e-6):
            for min_p in (0.0, 0.05, 1.0):
                sampler = Sampler(Sampling(top_k=top_k, top_p=top_p, min_p=min_p))
                assert set(sampler._candidates(logits).tolist()) == kept_by_definition(logits, top_k, top_p, min_p)


def test_of_equal_logits_the_lower_ids_are_kept():
    logits = np.zeros(600, np.float32)
    assert set(np.flatnonzero(frequencies(500, logits, top_k=3))) == {0, 1, 2}
    assert frequencies(2000, logits, top_p=0.5).nonzero()[0].max() < 300


def test_only_a_part_of_a_large_vocabulary_is_sorted(monkeypatch):
    """Sorting is what takes time."""
    sizes, argsort = [], np.argsort
    monkeypatch.setattr(np, "argsort", lambda x, **options: sizes.append(len(x)) or argsort(x, **options))
    logits = np.random.default_rng(0).standard_normal(150_000).astype(np.float32) * 5
    for settings in ({}, {"top_k": 0}, {"top_k": 0, "min_p": 0.0}, {"top_k": 0, "min_p": 0.0, "top_p": 1.0}):
        Sampler(Sampling(seed=1, **settings)).sample(logits, [])
    assert sum(sizes) < 10_000


def test_probabilities_of_sampled_tokens(model):
    generation = generate(model, [0, 5, 6], n_predict=4, temp=0, ignore_eos=True, n_probs=3)
    generation.text()
    assert [sampled.token for sampled in generation.sampled] == generation.tokens
    logits = model.logits([0, 5, 6, *generation.tokens])[2:-1].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    for row, sampled in zip(expected, generation.sampled, strict=True):
        assert sampled.logprob == pytest.approx(row[sampled.token], abs=1e-5)
        assert [i for i, _ in sampled.top] == np.argsort(-row, kind="stable")[:3].tolist()
        assert [p for _, p in sampled.top] == pytest.approx(np.sort(row)[::-1][:3], abs=1e-5)
    assert generate(model, [0], n_predict=1, temp=0).sampled == []


def test_cancelling_between_tokens_and_within_a_prompt(model, monkeypatch):
    session = model.session()
    generation = generate(model, [0, 5], n_predict=-1, temp=0, ignore_eos=True, session=session)
    pieces = iter(generation)
    next(pieces)
    generation.cancel()
    list(pieces)
    assert generation.reason == "cancelled"
    assert len(generation.tokens) < 10
    assert session.tokens == [0, 5, *generation.tokens[:-1]]
    monkeypatch.setitem(generate.__globals__, "_PROMPT_STEP", 4)
    generation = generate(model, list(range(2, 30)), session=session)
    feed = model.feed
    monkeypatch.setattr(model, "feed", lambda *batch: (generation.cancel(), feed(*batch))[1])
    assert generation.text() == ""
    assert generation.reason == "cancelled"
    assert session.tokens == [2, 3, 4, 5]


def test_a_prompt_read_in_several_passes_gives_the_same_tokens(model, monkeypatch):
    prompt = [int(i) for i in np.random.default_rng(1).integers(2, 250, 40)]
    whole = generate(model, prompt, n_predict=5, temp=0, ignore_eos=True)
    whole.text()
    monkeypatch.setitem(generate.__globals__, "_PROMPT_STEP", 7)
    session = model.session()
    steps = generate(model, prompt, n_predict=5, temp=0, ignore_eos=True, session=session)
    steps.text()
    assert steps.tokens == whole.tokens
    assert (steps.timings.prompt_tokens, steps.timings.cached_tokens) == (40, 0)
    again = generate(model, prompt, n_predict=5, temp=0, ignore_eos=True, session=session)
    again.text()
    assert (again.timings.prompt_tokens, again.timings.cached_tokens) == (1, 39)


@pytest.mark.parametrize(
    "invalid", [{"temp": float("nan")}, {"top_p": 0}, {"min_p": 2}, {"repeat_last_n": -2}, {"temp": float("inf")}]
)
def test_settings_out_of_range(invalid):
    with pytest.raises(PlanError, match=next(iter(invalid))):
        Sampling(**invalid)


def probabilities(logits):
    p = np.exp(logits.astype(np.float64) - logits.max())
    return p / p.sum()


@pytest.mark.parametrize("mass", [0.2, 0.7, 0.95])
def test_typical_sampling_keeps_the_tokens_nearest_to_the_entropy(mass):
    """The smallest set of tokens by the distance of their surprise from the entropy that has the mass (arXiv:2202.00666, 3)."""
    logits = np.random.default_rng(5).standard_normal(200) * 2
    p = probabilities(logits)
    entropy = -(p * np.log(p)).sum()
    kept, total = set(), 0.0
    for i in sorted(range(len(p)), key=lambda i: abs(-np.log(p[i]) - entropy)):
        if total >= mass:
            break
        kept.add(i)
        total += p[i]
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert set(Sampler(Sampling(typical_p=mass, **neutral))._candidates(logits).tolist()) == kept
    # A distribution whose most probable token is not typical: it can be dropped.
    surprising = np.log(np.array([0.5, *[0.5 / 400] * 400]))
    assert 0 not in Sampler(Sampling(typical_p=0.3, **neutral))._candidates(surprising)


def test_top_n_sigma_keeps_logits_within_standard_deviations_of_the_largest():
    """arXiv:2411.07641, algorithm 1."""
    logits = np.random.default_rng(6).standard_normal(500)
    for n in (0.5, 1.0, 2.0):
        expected = set(np.flatnonzero(logits >= logits.max() - n * logits.std()).tolist())
        for top_k in (0, 3):
            sampler = Sampler(Sampling(top_n_sigma=n, top_k=top_k, top_p=1.0, min_p=0.0))
            kept = set(sampler._candidates(logits).tolist())
            assert kept == (set(sorted(expected, key=lambda i: -logits[i])[:top_k]) if top_k else expected)


def test_xtc_excludes_all_but_the_last_of_the_top_choices():
    chances = frequencies(xtc_probability=0.5, xtc_threshold=0.15)  # 0.4, 0.3 and 0.2 are above
    p = np.exp(LOGITS)
    without = np.where(p > 0.25, 0, p) / p[p < 0.25].sum()
    assert np.abs(chances - (p + without) / 2).max() < 0.03
    assert np.abs(frequencies(xtc_probability=1.0, xtc_threshold=0.35) - p).max() < 0.03  # only one is above
    assert set(np.flatnonzero(frequencies(xtc_probability=1.0, xtc_threshold=0.15, temp=0))) == {2}


def test_the_temperature_follows_the_entropy():
    flat, peaked = np.zeros(5, np.float32), np.log(np.array([0.96, 0.01, 0.01, 0.01, 0.01], np.float32))
    sampler = Sampler(Sampling(temp=1.0, dynatemp_range=0.5, dynatemp_exponent=2.0))
    assert sampler.temperature(flat) == pytest.approx(1.5)
    p = probabilities(peaked)
    share = -(p * np.log(p)).sum() / np.log(5)
    assert sampler.temperature(peaked) == pytest.approx(0.5 + share**2)
    hot = np.exp(LOGITS / sampler.temperature(LOGITS))
    assert np.abs(frequencies(dynatemp_range=0.5, dynatemp_exponent=2.0) - hot / hot.sum()).max() < 0.03


def test_biases_are_added_before_anything_else():
    p = np.exp(LOGITS) * np.exp([0, -1.0, 0, 0, 2])
    assert np.abs(frequencies(logit_bias={1: -1.0, 4: 2.0}) - p / p.sum()).max() < 0.03
    assert frequencies(logit_bias={1: -np.inf})[1] == 0
    assert frequencies(10, logit_bias={1: -np.inf}, temp=0)[3] == 1
    with pytest.raises(PlanError, match="every token"):
        frequencies(1, logit_bias=dict.fromkeys(range(5), -np.inf))
    with pytest.raises(PlanError, match="logit_bias = inf"):
        Sampling(logit_bias={1: np.inf})


def test_biases_of_texts(model):
    biased = generate(model, "a", n_predict=3, temp=0, ignore_eos=True, logit_bias={"xy": 1000.0})
    assert set(biased.text()) <= {"x", "y"}
    with pytest.raises(PlanError, match="no token 9999"):
        generate(model, "a", logit_bias={9999: 1.0})


def test_scores_of_a_prompt(model):
    prompt = [0, *range(30, 200), 7]
    generation = generate(model, prompt, n_predict=1, temp=0, n_probs=1, score_prompt=True, session=model.session(200))
    generation.text()
    logits = model.logits(prompt).astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    assert [score.token for score in generation.prompt_scores] == prompt[1:]
    for row, score in zip(expected, generation.prompt_scores, strict=False):
        assert score.logprob == pytest.approx(row[score.token], abs=1e-4)
        assert score.top[0] == (int(row.argmax()), pytest.approx(row.max(), abs=1e-4))
    (last,) = generation.sampled or [generation.ending]
    assert last.logprob == pytest.approx(expected[-1].max(), abs=1e-4)


def test_short_prompts_are_read_as_generated_tokens(model, monkeypatch):
    """All at once, by their length alone: nor do they begin with what was read of a longer prompt, or that with theirs."""
    passes, hidden = [], model.executable.hidden

    def noted(tokens, *others, generated, last):
        passes.append((len(tokens), generated))
        return hidden(tokens, *others, generated=generated, last=last)

    monkeypatch.setattr(model.executable, "hidden", noted)
    long = [0, *range(40, 90)]

    def answer(prompt, session):
        passes.clear()
        generation = generate(model, prompt, n_predict=3, temp=0, ignore_eos=True, n_probs=3, session=session)
        generation.text()
        return [(each.token, each.logprob) for each in generation.sampled], generation.timings.cached_tokens, passes[:2]

    for length in (1, 2, model.short_prompt, model.short_prompt + 1):
        is_short = length <= model.short_prompt
        alone, _, first = answer(long[:length], None)
        assert first[0] == ((length, True) if is_short else (length - 1, False))
        session = model.session()
        answer(long, session)
        again, cached, _ = answer(long[:length], session)
        assert again == alone
        assert cached == (0 if is_short else length - 1)
        after, cached, _ = answer(long, session)
        assert after == answer(long, None)[0]
        assert cached == (0 if is_short else length - 1)
