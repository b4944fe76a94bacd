"""Answers that follow a schema or a grammar, with OpenAI's Python client."""

import json
from concurrent.futures import ThreadPoolExecutor

import pytest

openai = pytest.importorskip("openai")
jsonschema = pytest.importorskip("jsonschema")
pytest.importorskip("llguidance")

ASK = [{"role": "user", "content": "Hello"}]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "kind": {"enum": ["small", "large"]},
        "numbers": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "numbers"],
    "additionalProperties": False,
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "thing", "schema": SCHEMA, "strict": True}}
ANY = {"temperature": 2.0, "top_p": 1.0, "extra_body": {"top_k": 0, "min_p": 0.0}}


@pytest.fixture(scope="module")
def client(random_model, served):
    """Of a model with random weights."""

    template = "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> #}"
    template += "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> #}{{ '<think>' if thinking }}"
    keys = {"tokenizer.chat_template": template, "llama.context_length": 1024}
    url = served(random_model(keys, parallel=2), warm_up=False)
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.mark.parametrize("seed", range(3))
def test_chats_follow_a_schema(client, seed):
    reply = client.chat.completions.create(model="x", messages=ASK, response_format=FORMAT, seed=seed, **ANY)
    assert reply.choices[0].finish_reason == "stop"
    jsonschema.validate(json.loads(reply.choices[0].message.content), SCHEMA)


def test_streams_at_the_same_time_follow_their_own_schemas(client):
    def ask(seed):
        schema = {"type": "array", "items": {"const": seed}, "minItems": 2, "maxItems": 2}
        form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": schema}}
        chunks = client.chat.completions.create(model="x", messages=ASK, response_format=form, seed=seed, stream=True, **ANY)
        return json.loads("".join(c.choices[0].delta.content or "" for c in chunks if c.choices))

    with ThreadPoolExecutor(3) as pool:
        assert list(pool.map(ask, range(3))) == [[0, 0], [1, 1], [2, 2]]


@pytest.mark.parametrize("stream", [False, True])
def test_each_choice_follows_the_schema_on_its_own(client, stream):
    """n choices share the grammar, not where they are in it."""
    ask = {"model": "x", "messages": ASK, "response_format": FORMAT, "n": 3, "seed": 1, **ANY}
    if stream:
        texts = [""] * 3
        for chunk in client.chat.completions.create(**ask, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.delta.content or ""
    else:
        texts = [choice.message.content for choice in client.chat.completions.create(**ask).choices]
    assert len(set(texts)) == 3
    for text in texts:
        jsonschema.validate(json.loads(text), SCHEMA)
    free = {"top_k": 0, "min_p": 0.0, "grammar": 'root ::= ("yes" | "no") "!"'}
    reply = client.completions.create(model="x", prompt="a", n=2, best_of=4, temperature=2.0, seed=2, extra_body=free)
    assert {choice.text for choice in reply.choices} <= {"yes!", "no!"}


def test_any_object(client):
    form = {"type": "json_object"}
    reply = client.chat.completions.create(model="x", messages=ASK, response_format=form, max_tokens=30, seed=1, **ANY)
    assert reply.choices[0].message.content.startswith("{")
    assert client.chat.completions.create(model="x", messages=ASK, response_format={"type": "text"}, max_tokens=2)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"grammar": 'root ::= "yes"'}, "yes"),
        ({"grammar": '%llguidance {}\nstart: "lark"'}, "lark"),
        ({"json_schema": {"const": "a"}}, '"a"'),
        ({"response_format": {"type": "json_object", "schema": {"const": 12}}}, "12"),
    ],
)
def test_completions_and_fields_of_llama_cpp(client, fields, text):
    assert client.completions.create(model="x", prompt="a", extra_body=fields).choices[0].text.split() == [text]
    reply = client.chat.completions.create(model="x", messages=ASK, extra_body=fields)
    assert reply.choices[0].message.content.split() == [text]


def test_stop_texts_end_an_answer_with_a_grammar(client):
    assert (
        client.completions.create(model="x", prompt="a", stop="c", extra_body={"grammar": 'root ::= "abcd"'}).choices[0].text
        == "ab"
    )


def test_thoughts_are_free(client):
    """The grammar begins after the end of the thoughts; random weights never end them."""
    body = {"grammar": 'root ::= "yes"', "chat_template_kwargs": {"thinking": True}}
    message = client.chat.completions.create(model="x", messages=ASK, max_tokens=20, seed=3, extra_body=body).choices[0].message
    assert message.model_extra["reasoning_content"]
    assert "yes" not in (message.content or "")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format"),
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "objekt"}}}}, "response_format"),
        ({"response_format": {"type": "json_object", "schema": {"not": {}}}}, "response_format"),
        ({"json_schema": [1]}, "json_schema"),
        ({"json_schema": {"$ref": "#/nowhere"}}, "json_schema"),
        ({"grammar": 'root ::= "a'}, "grammar"),
        ({"grammar": 5}, "grammar"),
        ({"grammar": 'root ::= "a"', "json_schema": {}}, "json_schema"),
    ],
)
def test_refusals_name_the_field(client, fields, param):
    for create in (
        lambda **o: client.completions.create(prompt="a", **o),
        lambda **o: client.chat.completions.create(messages=ASK, **o),
    ):
        with pytest.raises(openai.BadRequestError) as error:
            create(model="x", extra_body=fields)
        assert error.value.param.startswith(param) or param in error.value.message
        assert "\n" not in error.value.message


def tool(name, strict=None, **properties):
    schema = {"type": "object", "properties": properties, "required": list(properties), "additionalProperties": False}
    return {
        "type": "function",
        "function": {"name": name, "parameters": schema, **({} if strict is None else {"strict": strict})},
    }


TOOLS = [tool("weather", city={"enum": ["Oslo", "Rome"]}), tool("clock", hour={"type": "integer", "minimum": 0, "maximum": 23})]


def call(client, **options):
    return client.chat.completions.create(model="x", messages=ASK, tools=TOOLS, **options, **ANY)


@pytest.mark.parametrize("seed", range(2))
def test_a_call_that_is_required(client, seed):
    choice = call(client, tool_choice="required", parallel_tool_calls=False, seed=seed).choices[0]
    (made,) = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    (schema,) = [each["function"]["parameters"] for each in TOOLS if each["function"]["name"] == made.function.name]
    jsonschema.validate(json.loads(made.function.arguments), schema)


def test_a_named_function_in_a_stream(client):
    chunks = list(call(client, tool_choice={"type": "function", "function": {"name": "clock"}}, stream=True, seed=5))
    calls = [made for chunk in chunks for made in chunk.choices[0].delta.tool_calls or []]
    assert {made.function.name for made in calls} == {"clock"}
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


def test_a_form_of_answers_that_call_nothing(client):
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": {"const": 7}}}
    message = call(client, response_format=form, seed=1).choices[0].message
    assert message.tool_calls or message.content.strip() == "7"


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"tools": [tool("a b")]}, "tools[0].function.name"),
        ({"tools": [tool("a", strict=True, b={"not": {}})]}, "tools"),
        ({"tools": [TOOLS[0]] * 129}, "tools"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
    ],
)
def test_refused_tools(client, options, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.chat.completions.create(**({"model": "x", "messages": ASK, "tools": TOOLS} | options))
    assert error.value.param == param


BEYOND_THE_LIMITS = {
    "alternatives": {"grammar": "root ::= " + " | ".join(f'"w{i}"' for i in range(5000))},
    "a long text": {"json_schema": {"enum": ["x" * 60000]}},
    "properties": {"json_schema": {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(1500)}}},
    "repetitions of a pattern": {"json_schema": {"type": "string", "pattern": "^((a{1,100}){1,100}){1,100}$"}},
    "repetitions of classes": {"json_schema": {"type": "string", "pattern": r"^\p{L}{1,400}\w{400}$"}},
    "repetitions in Lark": {"grammar": "start: /((a{0,500}){0,500}){0,500}/"},
    "a reference to itself": {"json_schema": {"$ref": "#"}},
    "rules that lead to each other": {"grammar": "start: a\na: b\nb: a"},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", BEYOND_THE_LIMITS.values(), ids=BEYOND_THE_LIMITS.keys())
def test_a_grammar_beyond_the_limits_is_the_clients_fault(client, asked, stream):
    """No status 500, whether it is found at once or with a later token; some are followed."""
    error = error_of(client, stream, asked)
    if isinstance(error, openai.APIStatusError):
        assert (error.status_code, error.code) == (400, "invalid_value")
    elif error is not None:  # in a stream that has begun
        assert (stream, error.type) == (True, "invalid_request_error")


def error_of(client, stream, asked):
    try:
        reply = client.chat.completions.create(model="x", messages=ASK, max_tokens=8, stream=stream, extra_body=asked)
        chunks = list(reply) if stream else [reply]
    except openai.APIError as error:
        return error
    return None if chunks else ValueError
