import json

import pytest

from ggufmill.convert.tokenizers.pretokenizers import _CANDIDATES, definition, identified_by_behaviour, identify
from ggufmill.formats.pretokenizers import PRE_TOKENIZERS

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_BEFORE = r"[^\r\n\p{L}\p{N}]?"  # one character that a word may start with
_SYMBOLS = r" ?[^\s\p{L}\p{N}]+"
_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"  # as in DeepSeek-LLM and Coder, middle range included
# DeepSeek-LLM: letters of scripts with two cases
_CASED_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376"
    "\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f\u0531-"
    "\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77\u1d79-\u1d9a"
    "\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d\u1f5f-\u1f7d\u1f80-\u1fb4"
    "\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc"
    "\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f"
    "\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b"
    "\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a"
    "\U00010400-\U0001044f\U000104b0-\U000104d3\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2"
    "\U000118a0-\U000118df\U0001e900-\U0001e943"
)


def _split(regex):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def _bytes(use_regex=False):
    """Bytes as printable characters; use_regex: after splitting by GPT-2's regular expression."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


_DIGITS = {"type": "Digits", "individual_digits": True}


def _words(before, digits, symbols):
    return _split("|".join((_CONTRACTIONS, before, digits, symbols, _SPACES)))


def _cased(after, digits):
    """Words that end where capitals begin; `after`: what may follow a word."""
    words = f"{_BEFORE}{_UPPER}*{_LOWER}+{after}|{_BEFORE}{_UPPER}+{_LOWER}*{after}"
    return _split("|".join((words, digits, _SYMBOLS + r"[\r\n/]*", _SPACES)))


# From published tokenizer.json files: name for tokenizer.ggml.pre, ignore_merges, steps of the pre_tokenizer
PUBLISHED = (
    (
        "deepseek-v3",
        False,
        [
            _split(r"\p{N}{1,3}"),
            _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
            _split(
                "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
                "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
            ),
            _bytes(),
        ],
    ),
    (
        "deepseek-llm",
        False,
        [
            _split("[\r\n]"),
            _split(f"\\s?[{_CASED_LETTERS}]+"),
            _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
            _split(r"\s+$"),
            _split(_CJK),
            _DIGITS,
            _bytes(),
        ],
    ),
    (
        "deepseek-coder",
        False,
        [_split("[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _split(_CJK), _DIGITS, _bytes()],
    ),
    ("llama-bpe", True, [_words(_BEFORE + r"\p{L}+", r"\p{N}{1,3}", _SYMBOLS + r"[\r\n]*"), _bytes()]),
    ("smaug-bpe", False, [_words(_BEFORE + r"\p{L}+", r"\p{N}{1,3}", _SYMBOLS + r"[\r\n]*"), _bytes()]),
    ("qwen2", False, [_words(_BEFORE + r"\p{L}+", r"\p{N}", _SYMBOLS + r"[\r\n]*"), _bytes()]),
    (
        "qwen35",
        False,
        [_words(_BEFORE + r"[\p{L}\p{M}]+", r"\p{N}", r" ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"), _bytes()],
    ),
    ("gpt-4o", False, [_cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"), _bytes()]),
    ("tekken", True, [_cased("", r"\p{N}"), _bytes()]),
    ("seed-coder", False, [_words(_BEFORE + r"\p{L}+", r"\p{N}{1}", r" ?[^\s\p{L}\p{N}\r\n]+"), _bytes()]),
    ("starcoder", False, [_DIGITS, _bytes(use_regex=True)]),
    ("gpt-2", False, [_bytes(use_regex=True)]),
)


CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize(("name", "ignore_merges", "steps"), PUBLISHED, ids=[k[0] for k in PUBLISHED])
def test_published_rules_are_recognised(name, ignore_merges, steps):
    assert identify(sequence(*steps), ignore_merges) == (name, "")


@pytest.mark.parametrize("name", _CANDIDATES)
def test_every_candidate_is_recognised_by_its_own_name(name):
    rule = PRE_TOKENIZERS[name]
    steps = [split(regex) for regex in rule.splits]
    assert identify(sequence(*steps, BYTES), rule.ignore_merges) == (name, "")


@pytest.mark.parametrize("literal", [False, True])
@pytest.mark.parametrize("name", _CANDIDATES)
def test_a_known_spelling_is_taken_for_what_it_does(name, literal):
    spelt = definition(name, literal)
    for ignore_merges in (False, True):
        assert identify(spelt, ignore_merges) == identified_by_behaviour(json.dumps(spelt), ignore_merges)


# From the models' tokenizer.json; Kimi-K2's rule is in the code beside the model
OTHERS = {
    "bloom": [_split(" ?[^(\\s|[.,!?…。，、।۔،])]+"), _bytes()],
    "tiny_aya": [
        _split(r"\d{1,3}(?=(?:\d{3})*\b)"),
        _cased(f"{_CONTRACTIONS}?", r"\p{N}{1,3}"),
        _bytes(),
    ],
    "kimi-k2": [
        _split(
            "|".join(
                (
                    r"[\p{Han}]+",
                    rf"{_BEFORE}[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_CONTRACTIONS}?",
                    rf"{_BEFORE}[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_CONTRACTIONS}?",
                    r"\p{N}{1,3}",
                    _SYMBOLS + r"[\r\n]*",
                    _SPACES,
                )
            )
        ),
        _bytes(),
    ],
}


@pytest.mark.parametrize("name", OTHERS)
def test_rarer_rules_are_recognised(name):
    assert identify(sequence(*OTHERS[name]), False) == (name, "")


# Another regular expression that splits the same: token ids are the same under either name.
def test_an_equivalent_rule():
    bailing = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    assert identify(sequence(split(bailing), BYTES), False) == ("qwen2", "")


def test_other_forms_are_recognised():
    assert identify(sequence(split(f"{CONTRACTIONS}|{REST % '{1,3}'}"), BYTES), True) == ("llama-bpe", "")
    # as converted from tiktoken files: everything but the matches is removed
    assert identify(sequence(split(f"{CONTRACTIONS}|{REST % ''}", "Removed", True), BYTES), False) == ("qwen2", "")
    assert identify({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}, False) == ("gpt-2", "")


def test_falcon_as_published():
    """tokenizer.json of Falcon 7B to 180B; llama.cpp's converter writes falcon too, whose expressions split otherwise."""
    steps = [
        {"type": "Punctuation", "behavior": "Contiguous"},
        _bytes(use_regex=True),
        {"type": "Digits", "individual_digits": False},
        split("[0-9][0-9][0-9]"),
    ]
    name, problem = identify(sequence(*steps), False)
    assert name == "falcon"
    assert "a few texts may differ" in problem
    assert identify(sequence(*steps[:-1]), False)[0] == "default"


def test_small_differences_are_not_missed():
    for regex in (
        f"{CONTRACTIONS}|{REST % '{1,2}'}",
        REST % "{1,3}",
        f"{CONTRACTIONS}|{REST % '{1,3}'}".replace(r"[\r\n]*", ""),
        f"{CONTRACTIONS}|{REST % '{1,3}'}".replace(r"\s+(?!\S)|", ""),
    ):
        name, problem = identify(sequence(split(regex), BYTES), True)
        assert name == "default"
        assert "unknown" in problem
    prefixed = {**BYTES, "use_regex": True, "add_prefix_space": True}
    assert identify(prefixed, False)[0] == "default"


def test_ignore_merges_is_compared():
    steps = sequence(split(f"{CONTRACTIONS}|{REST % '{1,3}'}"), BYTES)
    assert identify(steps, False) == ("smaug-bpe", "")
    name, problem = identify(sequence(split(f"{CONTRACTIONS}|{REST % ''}"), BYTES), True)
    assert name == "qwen2"
    assert "ignore_merges True" in problem


@pytest.mark.parametrize("broken", [{}, {"type": "Nonsense"}, sequence(split("("), BYTES)])
def test_malformed_pre_tokenizers(broken):
    name, problem = identify(broken, False)
    assert name == "default"
    assert "cannot be built" in problem
