"""DRY against its definition (llama.cpp's pull request 9702), and the tokens of its sequence breakers."""

import numpy as np
import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime import Sampler, Sampling, generate, load_model
from ggufmill.runtime.generation.repetition import Breakers, RepetitionPenalty, find_breakers

N_VOCAB = 6


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny)


def by_definition(past, multiplier, base, allowed, last_n, breakers):
    """What each token loses: the longest sequence that ends the text, stands before the token elsewhere in the searched part,
    and begins after the last breaker."""
    text = list(past if last_n < 0 else past[len(past) - min(last_n, len(past)) :])
    begins = [(i, i + len(each)) for each in breakers for i in range(len(text)) if tuple(text[i : i + len(each)]) == each]
    limit = len(text) - max(begins)[1] if begins else len(text)
    penalties = np.zeros(N_VOCAB)
    for token in range(N_VOCAB):
        lengths = [
            n
            for n in range(allowed, min(limit, len(text)) + 1)
            for i in range(max(n, 1), len(text))
            if text[i] == token and text[i - n : i] == text[len(text) - n :]
        ]
        if lengths and len(text) > allowed and (token,) not in breakers:
            penalties[token] = multiplier * base ** (max(lengths) - allowed)
    return penalties


@pytest.mark.parametrize("last_n", [-1, 0, 1, 12])
@pytest.mark.parametrize("allowed", [0, 1, 2, 5])
@pytest.mark.parametrize("breakers", [[], [(0,)], [(5, 4), (5, 4, 3), (2, 0)]])
def test_penalties_are_those_of_the_definition(last_n, allowed, breakers):
    by_end = {}
    for each in breakers:
        by_end.setdefault(each[-1], []).append(each)
    found = Breakers(by_end, frozenset(each[0] for each in breakers if len(each) == 1))
    random = np.random.default_rng(allowed)
    n_penalties = 0
    for values in ([3, 4], range(N_VOCAB)):
        penalty = RepetitionPenalty(0.8, 1.75, allowed, last_n, found)
        past = random.choice(values, 20).tolist()
        for _ in range(25):  # the first call reads a prompt, the others a token each
            logits = np.zeros(N_VOCAB)
            penalty.apply(logits, past)
            expected = by_definition(past, 0.8, 1.75, allowed, last_n, breakers)
            np.testing.assert_allclose(-logits, expected)
            n_penalties += np.count_nonzero(expected)
            past.append(int(random.choice(values)))
    assert n_penalties > 3 or last_n in (0, 1)


def test_long_repetitions_do_not_overflow():
    logits = np.zeros(3)
    RepetitionPenalty(1.0, 1.75, 2, -1, Breakers()).apply(logits, [1] * 3000)
    assert np.isfinite(logits).all()
    assert logits[1] < -1e38
    assert logits[0] == logits[2] == 0


def test_a_prompt_takes_no_quadratic_time():
    """Of repeated tokens, too: comparisons of tokens are counted."""
    n = 0

    class Token(int):
        def __eq__(self, other):
            nonlocal n
            n += 1
            return int(self) == int(other)

        __hash__ = int.__hash__

    RepetitionPenalty(1.0, 1.75, 2, -1, Breakers()).apply(np.zeros(3), [Token(1)] * 2000)
    assert 0 < n < 20_000


def test_a_text_that_repeats_itself_goes_on_differently(model):
    prompt = [0, 10, 11, 12, 13, 14, 10, 11, 12, 13]  # 12 is the end of a line

    def first(**options):
        settings = {"logit_bias": {14: 300.0, 15: 298.0}, "temp": 0, "ignore_eos": True, "n_predict": 1}
        generation = generate(model, prompt, **settings, **options)
        generation.text()
        return generation.tokens

    assert first() == [14]
    assert first(dry_multiplier=5.0, dry_sequence_breakers=()) == [15]
    assert first(dry_multiplier=5.0) == [14]
    assert first(dry_multiplier=5.0, dry_sequence_breakers=("x",)) == [15]


def test_the_tokens_of_breakers(model):
    """The vocabulary has a token for every byte, and some words; those that contain a breaker are one each."""
    tokenizer = model.tokenizer
    pieces = [tokenizer.piece(i) for i in range(tokenizer.n_vocab)]
    found = find_breakers(tokenizer, ("\n", "ab"))
    single = {i for i, piece in enumerate(pieces) if b"\n" in piece or b"ab" in piece}
    assert found.single >= single
    assert tokenizer.encode("\n", add_special=False)[0] in found.single
    pairs = {sequence for each in found.by_end.values() for sequence in each if len(sequence) > 1}
    rest = tuple(tokenizer.encode("b", add_special=False))
    assert pairs == {(i, *rest) for i, piece in enumerate(pieces) if piece.endswith(b"a") and i not in single}
    assert find_breakers(tokenizer, ("\n", "ab")) is found


def test_invalid_settings():
    for settings in ({"dry_base": 0.5}, {"dry_multiplier": -1}, {"dry_allowed_length": -1}, {"dry_sequence_breakers": ("",)}):
        with pytest.raises(PlanError, match=r"dry_|breaker"):
            Sampling(**settings)
    with pytest.raises(PlanError, match="needs the tokenizer"):
        Sampler(Sampling(dry_multiplier=1.0))
