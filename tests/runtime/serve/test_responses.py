"""OpenAI's API of responses, with OpenAI's Python client."""

import json

import pytest

openai = pytest.importorskip("openai")

ANSWER = "Hi <b>you!"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> #}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '\n' }}{% endfor %}a:"
)


def client_of(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(served, reciting):
    return client_of(served(reciting(ANSWER), alias="reciter"))


@pytest.fixture(scope="module")
def random_client(served, random_model):
    keys = {"tokenizer.chat_template": TEMPLATE, "llama.context_length": 2048}
    return client_of(served(random_model(keys), warm_up=False))


def test_a_response(client):
    reply = client.responses.create(model="x", input="Hello", instructions="Be kind.", store=False)
    assert (reply.status, reply.output_text, reply.model, reply.store) == ("completed", ANSWER, "reciter", False)
    assert reply.usage.input_tokens == len("s:Be kind.\nu:Hello\na:") + 1
    assert (reply.usage.output_tokens, reply.instructions) == (len(ANSWER), "Be kind.")
    cut = client.responses.create(model="x", input=[{"role": "user", "content": "Hello"}], max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason, cut.output_text) == ("incomplete", "max_output_tokens", "Hi")


def test_a_stream(client):
    events = list(client.responses.create(model="x", input="Hello", stream=True))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == [*begin, *["output_text.delta"] * len(ANSWER), *end]
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == ANSWER
    assert events[-1].response.output_text == ANSWER
    with client.responses.stream(model="x", input="Hello") as stream:
        stream.until_done()
        assert stream.get_final_response().output_text == ANSWER


def test_a_call_and_its_output(random_client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
    tools = [{"type": "function", "name": "weather", "parameters": schema, "strict": True}]
    ask = {"role": "user", "content": [{"type": "input_text", "text": "Hello"}]}
    arguments = {"model": "x", "input": [ask], "tools": tools, "tool_choice": {"type": "function", "name": "weather"}}
    (call,) = random_client.responses.create(**arguments, parallel_tool_calls=False).output
    assert (call.type, call.name, json.loads(call.arguments)) == ("function_call", "weather", {"city": "Oslo"})
    events = list(random_client.responses.create(**arguments, parallel_tool_calls=False, stream=True))
    (done,) = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert json.loads(done.arguments) == {"city": "Oslo"}
    items = [ask, call.model_dump(), {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}]
    assert random_client.responses.create(model="x", input=items, tools=tools, max_output_tokens=2).status == "incomplete"


def test_a_form(random_client):
    form = {"type": "json_schema", "name": "n", "schema": {"type": "integer", "minimum": 10, "maximum": 99}, "strict": True}
    assert 10 <= json.loads(random_client.responses.create(model="x", input="Hello", text={"format": form}).output_text) < 100


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}, "input[0].content[0]"),
        ({"input": [{"role": "cat", "content": "x"}]}, "input[0].role"),
        ({"instructions": 5}, "instructions"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format"),
        ({"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": "what"}}}}, "text.format"),
        ({"max_output_tokens": "many"}, "max_output_tokens"),
        ({"reasoning": {"effort": 5}}, "reasoning.effort"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "ab", "parameters": 5}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function"}]}, "tools[0].name"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"instructions": "x", "input": [{"role": "cat", "content": "x"}]}, "input[0].role"),
        ({"input": [{"type": "reasoning"}, {"role": "user", "content": 5}]}, "input[1].content"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": 5}]}, "input[0].arguments"),
        ({"input": [{"type": "function_call_output", "call_id": "x", "output": 5}]}, "input[0].output"),
        ({"input": "x" * 5000}, "input"),
        ({"temperature": -1}, "temperature"),
    ],
)
def test_refusals_name_the_field(client, fields, param):
    with pytest.raises(openai.BadRequestError) as error:
        client.responses.create(**({"model": "x", "input": "Hello"} | fields))
    assert error.value.param == param
    said = error.value.body["message"]
    assert not any(inner in said for inner in ("messages", "response_format", "max_tokens", "reasoning_effort", '"function":'))
