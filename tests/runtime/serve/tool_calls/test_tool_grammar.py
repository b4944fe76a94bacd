"""Calls that an answer has to make: every family's form, of random weights, is read back by the family's parser."""

import dataclasses
import json

import numpy as np
import pytest

from ggufmill.runtime import generate, load_model
from ggufmill.runtime.serve.tool_calls.tool_formats import TOOL_FORMATS
from ggufmill.runtime.serve.tool_calls.tool_grammar import tool_grammar

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

PARAMETERS = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "enum": ["Oslo", "Rome"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 9},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
CLOCK = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {}, "additionalProperties": False}},
}
FUNCTIONS = {tool["function"]["name"]: tool["function"]["parameters"] for tool in (WEATHER, CLOCK)}
ANY = {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


@pytest.fixture(scope="module")
def model(tiny):
    """With tags of some families as control tokens."""
    tokens, types = list(tiny.metadata["tokenizer.ggml.tokens"]), np.array(tiny.metadata["tokenizer.ggml.token_type"])
    for i, tag in enumerate(("[TOOL_CALLS]", "<｜tool▁calls▁begin｜>", "<|tool_call_begin|>", "<|START_ACTION|>")):
        tokens[3 + i], types[3 + i] = tag, 3
    metadata = tiny.metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return load_model(dataclasses.replace(tiny, metadata=metadata), n_ctx=2048)


def answer(model, grammar, seed=0, n_predict=1000):
    special = [id for _, id, _ in model.tokenizer.vocabulary.special_tokens if id not in model.tokenizer.eog_ids]
    running = generate(model, "x", n_predict, grammar=grammar, seed=seed, visible_special=special, **ANY)
    return running.text(), running.reason


@pytest.mark.parametrize("format", TOOL_FORMATS, ids=lambda format: format.template_tags[0])
def test_forced_calls_are_read_back(model, format):
    grammar = tool_grammar(model.tokenizer, format, [WEATHER, CLOCK], parallel=False, forced=True)
    text, reason = answer(model, grammar, 1)
    assert reason == "eos"
    assert text.startswith(format.start_tags)
    (call,) = format.parse(text, FUNCTIONS)
    jsonschema.validate(json.loads(call.arguments), FUNCTIONS[call.name])


@pytest.mark.parametrize("parallel", [True, False])
def test_calls_one_after_the_other(model, parallel):
    format = next(each for each in TOOL_FORMATS if each.template_tags == ("[TOOL_CALLS]",))
    mask = tool_grammar(model.tokenizer, format, [WEATHER, CLOCK], parallel=parallel, forced=True).start()
    tokens, logits = [], np.zeros(model.n_vocab, np.float32)
    calls = '{"name": "clock", "arguments": {}}, {"name": "clock", "arguments": {}}]'
    for token in model.tokenizer.encode(f"[TOOL_CALLS][{calls}", add_special=False, parse_special=True):
        row = mask(tokens, logits)
        if row is None or not np.isfinite(row[token]):
            break
        tokens.append(token)
    assert len(tokens) == (2 + len(calls) if parallel else 2 + calls.index(", {"))


def test_texts_without_quotes(model):
    format = next(each for each in TOOL_FORMATS if each.template_tags[0] == "<seed:tool_call>")
    schema = {"type": "object", "properties": {"note": {"type": "string"}}, "required": ["note"]}
    tool = {"type": "function", "function": {"name": "write", "parameters": schema}}
    grammar = tool_grammar(model.tokenizer, format, [tool], parallel=False, forced=True)
    mask, tokens = grammar.start(), []
    text = "<seed:tool_call>\n<function=write>\n<parameter=note>\nany <b> text\n</parameter>\n</function>\n</seed:tool_call>"
    for token in model.tokenizer.encode(text, add_special=False):
        assert np.isfinite(mask(tokens, np.zeros(model.n_vocab, np.float32))[token])
        tokens.append(token)


def test_calls_that_are_not_forced_follow_their_schema_from_the_tag_on(model):
    format = next(each for each in TOOL_FORMATS if each.template_tags == ("<tool_call>",))
    mask = tool_grammar(model.tokenizer, format, [WEATHER], parallel=False, forced=False).start()
    tokens, logits = [], np.zeros(model.n_vocab, np.float32)
    for token in model.tokenizer.encode("Let me <tool_call>", add_special=False):
        assert np.isfinite(mask(tokens, logits)).all()
        tokens.append(token)
    assert np.flatnonzero(np.isfinite(mask(tokens, logits))).tolist() == [2 + ord("\n")]
