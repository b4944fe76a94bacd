import json
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggufmill.formats import MillError, PlanError
from ggufmill.runtime import Tokenizer, generate, load_model
from ggufmill.runtime.generation import grammar
from ggufmill.runtime.generation.gbnf import gbnf_to_lark
from ggufmill.runtime.generation.grammar import MAX_GRAMMAR_LENGTH, compile_grammar, compile_schema

jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

ANY = {"temp": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}  # of random weights: any token that the grammar allows


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, n_ctx=2048)


scalars = st.one_of(
    st.just({"type": "boolean"}),
    st.just({"type": "null"}),
    st.just({"type": "integer", "minimum": -20, "maximum": 300}),
    st.just({"type": "string", "maxLength": 5}),
    st.just({"type": "string", "pattern": "^[A-C]{2}-[0-9]{3}$"}),
    st.just({"type": "string", "format": "date"}),
    st.lists(st.text(st.characters(codec="utf-8"), max_size=6), min_size=1, max_size=4).map(lambda values: {"enum": values}),
)


def nested(inner):
    arrays = inner.map(lambda items: {"type": "array", "items": items, "minItems": 1, "maxItems": 3})
    objects = st.dictionaries(st.text('abc_é"\\ ', min_size=1, max_size=4), inner, max_size=3).map(
        lambda properties: {
            "type": "object",
            "properties": properties,
            "required": sorted(properties)[:2],
            "additionalProperties": False,
        }
    )
    return st.one_of(arrays, objects, st.lists(inner, min_size=1, max_size=3).map(lambda each: {"anyOf": each}))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schema=st.recursive(scalars, nested, max_leaves=4), seed=st.integers(0, 1000))
def test_texts_fit_their_schema(model, schema, seed):
    running = generate(model, "x", 1000, grammar=compile_schema(model.tokenizer, schema), seed=seed, **ANY)
    text = running.text()
    assert running.reason == "eos"
    jsonschema.validate(json.loads(text), schema)


def published_vocabularies():
    """Metadata of vocabularies cut down to some hundred tokens; with a space in front of each text: llama-spm, phi-3."""
    with np.load(Path(__file__).parents[2] / "data" / "golden_vocabularies.npz") as arrays:
        vocabularies = json.loads(arrays["json"].tobytes())["vocabularies"]
    return {name: {f"tokenizer.ggml.{k}": v for k, v in each["metadata"].items()} for name, each in vocabularies.items()}


def unigram_vocabulary():
    pieces = [*[f"<0x{b:02X}>" for b in range(256)], "▁", "y", "es", "▁yes", "▁a", '"', "{", "}", ":"]
    types = [2, 3, 3, *[6] * 256, *[1] * (len(pieces) - 256)]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *pieces],
        "tokenizer.ggml.scores": -np.arange(len(types), dtype=np.float32),
        "tokenizer.ggml.token_type": np.array(types, np.int32),
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }


CHOICES = {"enum": ["yes a", "yes bc"]}  # made of characters that all of them have


@pytest.mark.parametrize("name", [*published_vocabularies(), "unigram"])
@pytest.mark.parametrize("kind", ["gbnf", "schema"])
def test_forced_text_has_no_space_in_front(name, kind):
    """Vocabularies that put one in front of each text refused their own first token."""
    tokenizer = Tokenizer(unigram_vocabulary() if name == "unigram" else published_vocabularies()[name])
    gbnf = 'root ::= "yes " [a-c]{3,5} "."'
    compiled = compile_grammar(tokenizer, gbnf) if kind == "gbnf" else compile_schema(tokenizer, CHOICES)
    for seed in range(5):
        draw, mask, tokens = np.random.default_rng(seed), compiled.start(), []
        while (logits := mask(tokens, np.zeros(tokenizer.n_vocab, np.float32))) is not None and len(tokens) < 200:
            tokens.append(int(draw.choice(np.flatnonzero(np.isfinite(logits)))))
            if tokens[-1] in tokenizer.eog_ids:
                break
        text = b"".join(tokenizer.piece(t) for t in tokens if t not in tokenizer.eog_ids).decode()
        if kind == "gbnf":
            assert re.fullmatch(r"yes [a-c]{3,5}\.", text), text
        else:
            jsonschema.validate(json.loads(text), CHOICES)


@pytest.mark.parametrize("draft_seed", range(4))
def test_any_json(model, draft_seed):
    grammar = compile_grammar(model.tokenizer, JSON)
    running = generate(model, "x", 60, grammar=grammar, seed=draft_seed, **ANY)
    text = running.text()
    if running.reason == "eos":
        json.loads(text)
    else:  # cut short: every text of the grammar begins with "{"
        assert text.startswith("{")


JSON = r"""
root   ::= object
value  ::= object | array | string | number | ("true" | "false" | "null") ws
object ::= "{" ws ( string ":" ws value ("," ws string ":" ws value)* )? "}" ws
array  ::= "[" ws ( value ("," ws value)* )? "]" ws   # a comment
string ::= "\"" ( [^"\\\x7F\x00-\x1F] | "\\" (["\\bfnrt] | "u" [0-9a-fA-F]{4}) )* "\"" ws
number ::= ("-"? ([0-9] | [1-9] [0-9]{0,15})) ("." [0-9]+)? ([eE] [-+]? [0-9] [1-9]{0,15})? ws
ws ::= | " " | "\n" [ \t]{0,20}
"""

# GBNF, the same language as a regular expression, texts of it, texts that are not
KINDS = [
    (r'root ::= "yes" | "no"', r"yes|no", ["yes", "no"], ["ye", "yesno", ""]),
    (r'root ::= [a-c]+ "end"', r"[a-c]+end", ["aend", "cabend"], ["end", "aendb"]),
    (r'root ::= ("a" | "ab") "bc"?', r"(a|ab)(bc)?", ["a", "abc", "abbc"], ["abcb"]),
    (
        r"root ::= item{2,3}" + "\n" + r'item ::= "- " [^\n]{1,3} "\n"',
        r"(- [^\n]{1,3}\n){2,3}",
        ["- a\n- b\n"],
        ["- a\n", "- \n- \n"],
    ),
    (r"root ::= [\u00e9\U0001F600-\U0001F602] .", r"[é😀-😂](?s:.)", ["éx", "😁\n"], ["e", "😃x"]),
    (r'root ::= "\"" [^"\\\x00-\x1F] "\"" [\]\-^]', r'"[^"\\\x00-\x1f]"[\]\-^]', ['"é"]', '"a"-', '"^"^'], ['"""-', '"a"\\']),
    ('root ::= (\n  rule-1 |\n  # nothing\n  ) "!"\nrule-1 ::= "x"{1,} ""', r"x*!", ["!", "xx!"], ["x", ""]),
    ('root ::= "a"{0,1} "b"{2,}', r"a?b{2,}", ["bb", "abbbb"], ["b", "aabb"]),
]


def accepted(model, grammar, text):
    mask, tokens = grammar.start(), []
    logits = np.zeros(model.n_vocab, np.float32)
    for token in [2 + b for b in text.encode()]:
        row = mask(tokens, logits)
        if row is None or not np.isfinite(row[token]):
            return False
        tokens.append(token)
    row = mask(tokens, logits)
    return row is None or bool(np.isfinite(row[1]))


@pytest.mark.parametrize(("gbnf", "pattern", "inside", "outside"), KINDS)
def test_gbnf(model, gbnf, pattern, inside, outside):
    grammar = compile_grammar(model.tokenizer, gbnf)
    for text in inside:
        assert re.fullmatch(pattern, text)
        assert accepted(model, grammar, text)
    for text in outside:
        assert not re.fullmatch(pattern, text)
        assert not accepted(model, grammar, text)
    for seed in range(3):
        running = generate(model, "x", 200, grammar=grammar, seed=seed, **ANY)
        text = running.text()
        assert running.reason != "eos" or re.fullmatch(pattern, text)


def test_nested_gbnf(model):
    grammar = compile_grammar(model.tokenizer, 'root ::= "(" root ")" root | ""')
    assert all(accepted(model, grammar, text) for text in ("", "()", "(())()"))
    assert not any(accepted(model, grammar, text) for text in ("(", ")", "())"))


def test_lark(model):
    grammar = compile_grammar(model.tokenizer, 'start: NUMBER ("," NUMBER)*\nNUMBER: /[0-9]{1,2}/')
    assert accepted(model, grammar, "1,23")
    assert not accepted(model, grammar, "1,234")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('root ::= "a', "line 1 of the grammar: .*is not GBNF"),
        ('root ::= "a"\nb ::= c', "line 2 of the grammar: there is no rule c"),
        ('b ::= "a"', "no rule root"),
        ('root ::= "a"\nroot ::= "b"', "rule root of the grammar is defined twice"),
        ('root ::= ("a"', "parenthesis is not closed"),
        ('root ::= "a")', "parenthesis closes"),
        ("root ::= []", "empty"),
        ("root ::= [z-a]", "the range z-a is empty"),
        ('root ::= "a"{3,2}', "repetitions"),
        ('root ::= "a"{2001}', "repetitions"),
        ("root ::= *", "nothing to repeat"),
        (r'root ::= "\q"', "escape"),
        (r"root ::= [\U00110000]", "no character"),
        ('"a" root ::= "a"', "a rule begins"),
        ("start: foo", "unknown name"),
        ("hello", "invalid grammar"),
        ("x" * (MAX_GRAMMAR_LENGTH + 1), "at most"),
        ("start: a\na: b\nb: a", "leads to nothing but itself"),
        ("root ::= " + "(" * 20_000 + '"a"' + ")" * 20_000, "nested"),
    ],
)
def test_invalid_grammars(model, text, message):
    with pytest.raises(PlanError, match=message) as error:
        compile_grammar(model.tokenizer, text)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 400


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "objekt"}, "objekt"),
        ({"not": {}}, "not"),
        ({"$ref": "https://example.com/schema"}, "not present"),
        ({"$ref": "#"}, "leads to nothing but itself"),
        ({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}, "leads to nothing but itself"),
    ],
)
def test_invalid_schemas(model, schema, message):
    with pytest.raises(PlanError, match=message):
        compile_schema(model.tokenizer, schema)


def test_a_schema_nested_too_deep(model):
    schema = {"type": "string"}
    for _ in range(3000):
        schema = {"anyOf": [schema]}
    with pytest.raises(PlanError, match="deep"):
        compile_schema(model.tokenizer, schema)


@given(st.text('rot :=|()[]"{}0,1*+?.\\-^x\n#', max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_text_is_gbnf_or_refused(text):
    try:
        assert gbnf_to_lark(text).startswith("%llguidance")
    except PlanError as error:
        message = str(error)
    else:
        message = ""
    assert "\n" not in message


def test_too_much_work_for_a_token_is_an_error(model, monkeypatch):
    monkeypatch.setitem(grammar._LIMITS, "max_items_in_row", 200)

    def read():
        mask = compile_grammar(model.tokenizer, 'root ::= a\na ::= "a" a | a a | ""').start()
        for n in range(3000):
            mask([2 + ord("a")] * n, np.zeros(model.n_vocab, np.float32))

    with pytest.raises((MillError, PlanError)):
        read()


def test_the_grammar_starts_after_a_text(model):
    grammar = compile_grammar(model.tokenizer, 'root ::= "ab"', starts_after="</t>")
    mask, logits = grammar.start(), np.zeros(model.n_vocab, np.float32)
    tokens = []
    for character in "any </t>":
        assert np.isfinite(mask(tokens, logits)).all()
        tokens.append(2 + ord(character))
    assert list(np.flatnonzero(np.isfinite(mask(tokens, logits)))) == [2 + ord("a")]


def test_stop_texts_and_limits_end_the_text_too(model):
    grammar = compile_grammar(model.tokenizer, 'root ::= "abcdefgh"')
    assert generate(model, "x", 3, grammar=grammar).text() == "abc"
    running = generate(model, "x", grammar=grammar, stop=["de"])
    assert (running.text(), running.reason) == ("abc", "stop")
    running = generate(model, "x", grammar=grammar, ignore_eos=True)
    assert (running.text(), running.reason) == ("abcdefgh", "eos")
