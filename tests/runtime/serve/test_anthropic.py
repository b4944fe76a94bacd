"""Anthropic's Python client against a running server."""

import pytest

ANSWER = "Hi <b>you!"
ASK = [{"role": "user", "content": "Hello"}]
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{# <tool_call> <think> #}{% for m in messages %}{{ m.role[0] }}:"
    "{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}{{ '\n' }}{% endfor %}"
    "a:{{ '<think>' if enable_thinking }}"
)


@pytest.fixture(scope="module")
def anthropic():
    """The client's package, whose import takes a quarter of what collecting all tests takes."""
    return pytest.importorskip("anthropic")


def client_of(url, key="none"):
    return pytest.importorskip("anthropic").Anthropic(base_url=url, api_key=key, max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def client(served, reciting):
    return client_of(served(reciting(ANSWER), alias="reciter"))


@pytest.fixture(scope="module")
def random_client(served, random_model):
    """Of a model with random weights, whose template knows functions and thoughts."""
    keys = {"tokenizer.chat_template": TEMPLATE, "llama.context_length": 2048}
    return client_of(served(random_model(keys), warm_up=False))


def test_a_message(client):
    reply = client.messages.create(model="x", max_tokens=100, messages=ASK, system="Be kind.")
    assert (reply.type, reply.role, reply.model, reply.stop_reason) == ("message", "assistant", "reciter", "end_turn")
    assert [block.text for block in reply.content] == [ANSWER]
    n_prompt = reply.usage.input_tokens + reply.usage.cache_read_input_tokens
    assert (n_prompt, reply.usage.output_tokens) == (len("s:Be kind.\nu:Hello\na:") + 1, len(ANSWER))
    count = client.messages.count_tokens(model="x", messages=ASK, system=[{"type": "text", "text": "Be kind."}])
    assert count.input_tokens == n_prompt


def test_a_stream(client):
    with client.messages.stream(model="x", max_tokens=100, messages=ASK) as stream:
        texts = list(stream.text_stream)
        final = stream.get_final_message()
    assert "".join(texts) == ANSWER
    assert len(texts) == len(ANSWER)
    assert final.stop_reason == "end_turn"
    assert final.usage.output_tokens == len(ANSWER)


def test_events_have_anthropic_s_order(client):
    events = client.messages.create(model="x", max_tokens=3, messages=ASK, stream=True)
    kinds = [event.type for event in events]
    deltas = ["content_block_delta"] * 3
    ends = ["content_block_stop", "message_delta", "message_stop"]
    assert kinds == ["message_start", "content_block_start", *deltas, *ends]


def test_ends(client):
    assert client.messages.create(model="x", max_tokens=2, messages=ASK).stop_reason == "max_tokens"
    reply = client.messages.create(model="x", max_tokens=100, messages=ASK, stop_sequences=["zzz", "yo"])
    assert (reply.stop_reason, reply.stop_sequence, reply.content[0].text) == ("stop_sequence", "yo", "Hi <b>")


def test_a_call_and_its_result(random_client):
    schema = {"type": "object", "properties": {"city": {"enum": ["Oslo"]}}, "required": ["city"], "additionalProperties": False}
    tools = [{"name": "weather", "description": "", "input_schema": schema}]
    choice = {"type": "tool", "name": "weather", "disable_parallel_tool_use": True}
    arguments = {"model": "x", "max_tokens": 300, "messages": ASK, "tools": tools, "tool_choice": choice}
    reply = random_client.messages.create(**arguments)
    (block,) = reply.content
    assert (reply.stop_reason, block.type, block.name, block.input) == ("tool_use", "tool_use", "weather", {"city": "Oslo"})
    with random_client.messages.stream(**arguments) as stream:
        (block,) = stream.get_final_message().content
    assert block.input == {"city": "Oslo"}
    result = {"type": "tool_result", "tool_use_id": block.id, "content": [{"type": "text", "text": "rain"}]}
    call = {"type": "tool_use", "id": block.id, "name": "weather", "input": {"city": "Oslo"}}
    messages = [*ASK, {"role": "assistant", "content": [call]}, {"role": "user", "content": [result]}]
    assert random_client.messages.create(model="x", max_tokens=2, messages=messages, tools=tools)


def test_thoughts_are_blocks_of_their_own(random_client):
    thinking = {"type": "enabled", "budget_tokens": 1024}
    reply = random_client.messages.create(model="x", max_tokens=20, messages=ASK, thinking=thinking)
    assert reply.content[0].type == "thinking"
    assert reply.content[0].thinking


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "x"}]}]}, "messages[0].content[1]"),
        ({"system": 5}, "system"),
        ({"tools": [{"name": "a"}]}, "tools[0]"),
        ({"tool_choice": {"type": "all"}}, "tool_choice"),
        ({"extra_body": {"temperature": -1}}, "temperature"),
        ({"thinking": {"type": "much"}}, "thinking.type"),
        ({"stop_sequences": [""]}, "stop_sequences"),
        ({"tools": [{"name": "a b", "input_schema": {}}]}, "tools[0].name"),
        ({"max_tokens": -5}, "max_tokens"),
    ],
)
def test_refusals_name_the_field(anthropic, client, fields, named):
    with pytest.raises(anthropic.BadRequestError) as error:
        client.messages.create(**({"model": "x", "max_tokens": 5, "messages": ASK} | fields))
    assert error.value.body["type"] == "error"
    assert error.value.body["error"]["param"] == named
    assert named in error.value.body["error"]["message"]


def test_the_key_is_taken_from_anthropic_s_header(anthropic, served, reciting):
    url = served(reciting(ANSWER), api_key="secret", warm_up=False)
    assert client_of(url, "secret").messages.create(model="x", max_tokens=5, messages=ASK)
    with pytest.raises(anthropic.AuthenticationError):
        client_of(url, "other").messages.create(model="x", max_tokens=5, messages=ASK)
