import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime.text.infill import infill_prompt
from ggufmill.runtime.text.tokenizer import Tokenizer

KEYS = {"fim_pre": 250, "fim_suf": 251, "fim_mid": 252}


def tokenizer(tiny, keys):
    return Tokenizer(tiny.metadata | {f"tokenizer.ggml.{name}_token_id": token for name, token in keys.items()})


def ids(text):
    return [2 + byte for byte in text.encode()]


def test_the_prompt_has_the_tokens_of_the_vocabulary_around_the_texts(tiny):
    prompt = infill_prompt(tokenizer(tiny, KEYS), "ab<s>", ids("y"))
    assert prompt == [0, 250, *ids("ab<s>"), 251, *ids("y"), 252]
    older = {"prefix": 250, "suffix": 251, "middle": 252}
    assert infill_prompt(tokenizer(tiny, older), "a", "b") == [0, 250, *ids("a"), 251, *ids("b"), 252]


def test_without_a_token_for_the_middle_the_suffix_comes_first(tiny):
    prompt = infill_prompt(tokenizer(tiny, {"fim_pre": 250, "fim_suf": 251}), "a", "b")
    assert prompt == [0, 251, *ids("b"), 250, *ids("a")]


def test_vocabularies_name_such_tokens(tiny):
    tokens = list(tiny.metadata["tokenizer.ggml.tokens"])
    tokens[200:203] = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
    named = Tokenizer(tiny.metadata | {"tokenizer.ggml.tokens": tokens})
    assert infill_prompt(named, "", "") == [0, 200, 201, 202]


def test_a_vocabulary_without_them_is_an_error(tiny):
    with pytest.raises(PlanError, match="no tokens to fill in the middle"):
        infill_prompt(tokenizer(tiny, {}), "a", "b")
