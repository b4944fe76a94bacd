"""Tool calls and reasoning, with OpenAI's Python client."""

import dataclasses
import json

import numpy as np
import pytest

from ggufmill.runtime import Sampler, load_model

openai = pytest.importorskip("openai")

WEATHER = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
ASK = [{"role": "user", "content": "Hello"}]
CALL = '{"name": "weather", "arguments": {"city": "Köln"}}'
HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools>{% endif %}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}{{ '\n' }}{% endfor %}"
    "a:{{ '<think>' if thinking }}{# </think> #}"
)
MISTRAL = "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{{ m.content }}{% endfor %}{# [TOOL_CALLS] #}"


@pytest.fixture
def saying(tiny, served, monkeypatch):
    """saying(text, template): client of a model that generates this text; '[TOOL_CALLS]' is a control token."""

    def start(text, template=HERMES, named=None, **options):
        tokens, types = list(tiny.metadata["tokenizer.ggml.tokens"]), np.array(tiny.metadata["tokenizer.ggml.token_type"])
        tokens[3], types[3] = "[TOOL_CALLS]", 3
        metadata = tiny.metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
        metadata |= {"tokenizer.chat_template": template, "llama.context_length": 4096}
        metadata |= {f"tokenizer.chat_template.{name}": each for name, each in (named or {}).items()}
        model = load_model(dataclasses.replace(tiny, metadata=metadata))
        script = [*model.tokenizer.encode(text, add_special=False, parse_special=True), 1]
        positions = {}

        def sample(self, logits, past):
            positions[self] = positions.get(self, -1) + 1
            return script[positions[self]]

        monkeypatch.setattr(Sampler, "sample", sample)
        url = served(model, warm_up=False, **options)
        return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)

    return start


def ask(client, **options):
    return client.chat.completions.create(**({"model": "x", "messages": ASK, "tools": [WEATHER]} | options))


def test_a_call(saying):
    client = saying(f"I look.\n<tool_call>\n{CALL}\n</tool_call>")
    choice = ask(client, tool_choice="auto", logprobs=True).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls
    assert (call.type, call.function.name, json.loads(call.function.arguments)) == ("function", "weather", {"city": "Köln"})
    assert "".join(e.token for e in choice.logprobs.content).startswith("I look.\n<tool_call>")
    # The next request with the call and its result:
    answer = {"role": "tool", "tool_call_id": call.id, "content": "rain"}
    messages = [*ASK, choice.message.model_dump(exclude_none=True), answer]
    assert ask(client, messages=messages).choices[0].finish_reason == "tool_calls"
    prompt = client.post("/../apply-template", body={"messages": messages, "tools": [WEATHER]}, cast_to=object)["prompt"]
    assert prompt.startswith(f"<tools>{json.dumps([WEATHER])}</tools>u:Hello\n")
    before, call_text, after = prompt.replace("</tool_call>", "<tool_call>").split("<tool_call>")
    assert before.endswith("u:Hello\na:I look.")
    assert json.loads(call_text) == json.loads(CALL)  # arguments as an object, though the client sent JSON text
    assert after == "\nt:rain\na:"


def test_a_call_in_a_stream(saying):
    client = saying(f"I look. <tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>")
    chunks = list(ask(client, stream=True, logprobs=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert [(c.index, c.function.name, c.function.arguments) for c in calls] == [
        (i, "weather", '{"city": "Köln"}') for i in (0, 1)
    ]
    assert calls[0].id != calls[1].id
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    tokens = [entry.token for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content]
    assert len(tokens) == len(f"I look. <tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>".encode())
    with client.chat.completions.stream(model="x", messages=ASK, tools=[WEATHER]) as stream:  # merged by the client
        message = stream.get_final_completion().choices[0].message
    assert [call.function.name for call in message.tool_calls] == ["weather", "weather"]


def test_tags_that_are_control_tokens(saying):
    client = saying(f"[TOOL_CALLS][{CALL}]", MISTRAL)
    assert ask(client).choices[0].message.tool_calls[0].function.name == "weather"
    plain = ask(client, tools=openai.NOT_GIVEN).choices[0]
    assert (plain.message.content, plain.finish_reason) == (f"[{CALL}]", "stop")  # control tokens are left out


def test_answers_without_calls(saying):
    client = saying(f"<tool_call>{CALL}</tool_call>")
    for options in ({"tool_choice": "none"}, {"tools": openai.NOT_GIVEN}, {"tools": []}):
        choice = ask(client, **options).choices[0]
        assert (choice.message.content, choice.finish_reason) == (f"<tool_call>{CALL}</tool_call>", "stop")
        assert choice.message.tool_calls is None
    cut = ask(client, max_tokens=20).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("", "length")


def test_reasoning(saying):
    client = saying("<think>\nhm\n</think>\n\nYes.")
    choice = ask(client, tools=openai.NOT_GIVEN).choices[0]
    assert (choice.message.content, choice.message.model_extra["reasoning_content"]) == ("Yes.", "hm")
    deltas = [chunk.choices[0].delta for chunk in ask(client, tools=openai.NOT_GIVEN, stream=True)]
    assert "".join(delta.content or "" for delta in deltas) == "Yes."
    assert "".join((delta.model_extra or {}).get("reasoning_content", "") for delta in deltas) == "hm"
    raw = ask(client, extra_body={"reasoning_format": "none"}).choices[0].message
    assert raw.content == "<think>\nhm\n</think>\n\nYes."
    with pytest.raises(openai.BadRequestError, match="reasoning_format"):
        ask(client, extra_body={"reasoning_format": "loud"})


def test_reasoning_that_the_template_starts(saying):
    client = saying(f"hm</think><tool_call>{CALL}</tool_call>")
    message = ask(client, extra_body={"chat_template_kwargs": {"thinking": True}}).choices[0].message
    assert (message.content, message.model_extra["reasoning_content"]) == (None, "hm")
    assert message.tool_calls[0].function.name == "weather"


def test_a_separate_template_for_tools(saying):
    client = saying("Yes.", "plain", {"tool_use": "with {{ tools[0].function.name }}"})
    for tools, text in (([WEATHER], "with weather"), ([], "plain")):
        assert client.post("/../apply-template", body={"messages": ASK, "tools": tools}, cast_to=object)["prompt"] == text


def test_invalid_tools_are_named(saying):
    client = saying("Yes.")
    for options, param in (
        ({"tools": "weather"}, "tools"),
        ({"tools": [{"type": "custom"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 1}}]}, "tools[0].function.parameters"),
        ({"tool_choice": "always"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "function": {"name": "nothing"}}}, "tool_choice"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "messages[1].tool_calls[0]"),
        ({"messages": [*ASK, {"role": "assistant", "tool_calls": "x"}]}, "messages[1].tool_calls"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            ask(client, **options)
        assert caught.value.param == param
