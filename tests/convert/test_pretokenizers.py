import pytest

from ggufmill.convert.pretokenizers import KNOWN, identify

CONTRACTIONS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
REST = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}


def split(regex, behavior="Isolated", invert=False):
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": behavior, "invert": invert}


def sequence(*steps):
    return {"type": "Sequence", "pretokenizers": list(steps)}


@pytest.mark.parametrize(("name", "ignore_merges", "steps"), KNOWN, ids=[k[0] for k in KNOWN])
def test_each_is_itself_and_no_other(name, ignore_merges, steps):
    assert identify(sequence(*steps), ignore_merges) == (name, "")


def test_other_spellings_are_recognised():
    assert identify(sequence(split(f"{CONTRACTIONS}|{REST % '{1,3}'}"), BYTES), True) == ("llama-bpe", "")
    # as converted from tiktoken files: what matches is kept by removing the rest
    assert identify(sequence(split(f"{CONTRACTIONS}|{REST % ''}", "Removed", True), BYTES), False) == ("qwen2", "")
    assert identify({"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False}, False) == ("gpt-2", "")


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


def test_merging_of_whole_words_counts():
    steps = sequence(split(f"{CONTRACTIONS}|{REST % '{1,3}'}"), BYTES)
    assert identify(steps, False) == ("smaug-bpe", "")
    name, problem = identify(sequence(split(f"{CONTRACTIONS}|{REST % ''}"), BYTES), True)
    assert name == "qwen2"
    assert "ignore_merges True" in problem


@pytest.mark.parametrize("broken", [{}, {"type": "Nonsense"}, sequence(split("("), BYTES)])
def test_what_cannot_be_built(broken):
    name, problem = identify(broken, False)
    assert name == "default"
    assert "cannot be built" in problem
