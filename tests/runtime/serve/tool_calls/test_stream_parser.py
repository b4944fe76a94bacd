"""Reasoning, content and tool calls of answers in the formats of many model families."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("starlette")
from ggufmill.runtime.serve.tool_calls.prompt_renderer import PromptRenderer
from ggufmill.runtime.serve.tool_calls.stream_parser import StreamParser
from ggufmill.runtime.serve.tool_calls.tool_formats import find_reasoning_format, find_tool_format, special_tokens_in_tags
from ggufmill.runtime.text.chat import ChatTemplate

FUNCTIONS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}},
    "now": {"properties": {}},
}
WEATHER = ("weather", {"city": 'São "P"', "days": 3, "more": {"a": [1, None]}})
OBJECT = '{"city": "S\\u00e3o \\"P\\"", "days": 3, "more": {"a": [1, null]}}'
NAMED = f'{{"name": "weather", "arguments": {OBJECT}}}'

# family -> (text in its template, how its models write a call of `weather` and then one of `now`)
FAMILIES = {
    "hermes": ("<tool_call>", f'<tool_call>\n{NAMED}\n</tool_call>\n<tool_call>\n{{"name": "now"}}\n</tool_call>'),
    "hermes, never closed": ("<tool_call>", f'<tool_call>{NAMED}</tool_call><tool_call>{{"name": "now", "arguments": {{}}}}'),
    "qwen3 coder": (
        "<tool_call> <function= <parameter=",
        '<tool_call>\n<function=weather>\n<parameter=city>\nSão "P"\n</parameter>\n<parameter=days>\n3\n</parameter>\n'
        '<parameter=more>\n{"a": [1, null]}\n</parameter>\n</function>\n</tool_call>\n'
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
    "seed": (
        "<seed:tool_call> <function=",
        '<seed:tool_call>\n<function=weather>\n<parameter=city>São "P"</parameter>\n<parameter=days>3</parameter>\n'
        '<parameter=more>{"a": [1, null]}</parameter>\n</function>\n</seed:tool_call>'
        "<seed:tool_call><function=now></function></seed:tool_call>",
    ),
    "minimax": (
        "<minimax:tool_call>",
        '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">São "P"</parameter>\n'
        '<parameter name="days">3</parameter>\n<parameter name="more">{"a": [1, null]}</parameter>\n</invoke>\n'
        '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
    ),
    "glm": (
        "<tool_call> <arg_key>",
        '<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>São "P"</arg_value>\n<arg_key>days</arg_key>\n'
        '<arg_value>3</arg_value>\n<arg_key>more</arg_key>\n<arg_value>{"a": [1, null]}</arg_value>\n</tool_call>\n'
        "<tool_call>now\n</tool_call>",
    ),
    "llama": (
        '{"name": function name, "parameters"',
        f'{{"name": "weather", "parameters": {OBJECT}}}; {{"name": "now", "parameters": {{}}}}',
    ),
    "llama, with its tag": (
        '{"name": function name, "parameters"',
        f'<|python_tag|>{{"type": "function", "name": "weather", "parameters": {OBJECT}}}\n{{"name": "now"}}',
    ),
    "mistral": ("[TOOL_CALLS]", f'[TOOL_CALLS] [{NAMED}, {{"name": "now", "arguments": {{}}, "id": "abcdefghi"}}]'),
    "mistral, later": ("[TOOL_CALLS] [ARGS]", f"[TOOL_CALLS]weather[ARGS]{OBJECT}[TOOL_CALLS]now[CALL_ID]abcdefghi[ARGS]{{}}"),
    "deepseek": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n{OBJECT}\n```<｜tool▁call▁end｜>\n"
        "<｜tool▁call▁begin｜>function<｜tool▁sep｜>now\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "deepseek 3.1": (
        "<｜tool▁calls▁begin｜>",
        f"<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{OBJECT}<｜tool▁call▁end｜>"
        "<｜tool▁call▁begin｜>now<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ),
    "kimi": (
        "<|tool_calls_section_begin|><|tool_call_begin|>",
        f"<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>{OBJECT}<|tool_call_end|>"
        "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
    ),
    "gpt-oss": (
        "<|channel|>",
        f"<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{OBJECT}<|call|>"
        "<|start|>assistant to=functions.now<|channel|>commentary json<|message|>{}",
    ),
    "command r": (
        "<|START_ACTION|>",
        f'<|START_ACTION|>[{{"tool_call_id": "0", "tool_name": "weather", "parameters": {OBJECT}}},\n'
        '{"tool_call_id": "1", "tool_name": "now", "parameters": {}}]<|END_ACTION|>',
    ),
    "granite": ("<|tool_call|>", f'<|tool_call|>[{NAMED}, {{"name": "now", "arguments": {{}}}}]'),
    "nemotron": ("<TOOLCALL>", f'<TOOLCALL>[{NAMED}, {{"name": "now", "arguments": "{{}}"}}]</TOOLCALL>'),
    "apriel": ("<tool_calls>[", f'<tool_calls>[{NAMED}, {{"name": "now", "arguments": {{}}}}]</tool_calls>'),
    "functionary": ("<function=x></function>", f"<function=weather>{OBJECT}</function><function=now>{{}}</function>"),
}


def parse(template, pieces, tools=True, in_reasoning=False):
    """(content, reasoning, calls)"""
    tool_format = find_tool_format(template) if tools else None
    parser = StreamParser(find_reasoning_format(template), tool_format, FUNCTIONS, in_reasoning)
    deltas = [delta for piece in pieces for delta in parser.feed(piece)] + parser.finish()
    content, reasoning = ("".join(d.get(key, "") for d in deltas) for key in ("content", "reasoning_content"))
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(parser.n_calls))
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return content, reasoning, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("family", FAMILIES)
def test_calls_of_each_family(family):
    template, text = FAMILIES[family]
    for pieces in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
        assert parse(template, pieces) == ("", "", [WEATHER, ("now", {})])
    if not family.startswith("llama"):
        assert parse(template, ["Let me see.\n", text]) == ("Let me see.", "", [WEATHER, ("now", {})])
    assert parse(template, [text], tools=False)[2] == []


@pytest.mark.parametrize("family", FAMILIES)
def test_text_that_cannot_be_parsed_as_a_call_is_content(family):
    template, text = FAMILIES[family]
    start = find_tool_format(template).start_tags[0]
    invalid = (
        f"{start}",
        f"{start} and so on, {{",
        text[: text.index("null")],  # cut off
        f'{start}{{"name": 5, "arguments": {{}}}}',
        f'{start}{{"name": "weather", "arguments": [1]}}',
        f'{start}{{"name": "weather", "arguments": {{"a": NaN}}}}',
        f'{start}{{"name": "weather", "arguments": "{{"}}',
        start + "[" * 5000,
    )
    reasoning_format = find_reasoning_format(template)
    for answer in invalid:
        content, reasoning, calls = parse(template, [answer])
        assert (reasoning, calls) == ("", []), answer[:200]
        for tag in reasoning_format.removed_tags if reasoning_format else ():
            answer, content = answer.replace(tag, ""), content.replace(tag, "")
        assert content.strip() == answer.strip()


@pytest.mark.parametrize("family", FAMILIES)
def test_half_a_call_that_a_limit_cut_is_no_content(family):
    """Wherever the limit falls: what was complete is returned, and of tagged calls no markup."""
    template, text = FAMILIES[family]
    format = find_tool_format(template)
    reasoning = find_reasoning_format(template)
    begins = max(len(tag) for tag in format.start_tags)
    for length in range(begins, len(text)):
        parser = StreamParser(reasoning, format, FUNCTIONS)
        deltas = parser.feed(text[:length]) + parser.finish(cut=True)
        content = "".join(d.get("content", "") for d in deltas)
        calls = [call for d in deltas for call in d.get("tool_calls", ())]
        if format.untagged:
            assert bool(content) != bool(calls)
        elif content:  # at most a tag that had only begun, which might have become any text
            assert any(tag.startswith(content.strip()) and tag != content.strip() for tag in format.start_tags), (
                length,
                content,
            )
        assert [call["function"]["name"] for call in calls] == ["weather", "now"][: len(calls)]


def test_untagged_calls_are_accepted_only_of_declared_functions():
    template, _ = FAMILIES["llama"]
    for text in ('{"name": "Bob", "parameters": {}}', '{"answer": 42}', 'As JSON: {"name": "now", "parameters": {}}'):
        assert parse(template, list(text)) == (text, "", [])


def test_a_call_is_returned_as_soon_as_it_is_complete():
    template, _ = FAMILIES["hermes"]
    parser = StreamParser(None, find_tool_format(template), FUNCTIONS)
    assert parser.feed('<tool_call>{"name": "now", "arguments": {"a": "</tool_') == []
    assert parser.feed('call>"}}</tool_') == []  # the tag within a string does not end the call
    assert parser.feed("call>")[0]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": "</tool_call>"}'}
    assert parser.feed("And") == [{"content": "And"}]


def test_reasoning():
    for template, answer in (
        ("<think>", "<think>\nhm, {x}\n</think>\n\nYes."),
        ("[THINK]", "[THINK]hm, {x}[/THINK]Yes."),
        ("<seed:think>", "<seed:think>hm, {x}</seed:think>Yes."),
        (
            "<|channel|>",
            "<|channel|>analysis<|message|>hm, {x}<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ),
        ("<|START_THINKING|>", "<|START_THINKING|>hm, {x}<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
    ):
        for pieces in ([answer], list(answer)):
            assert parse(template, pieces) == ("Yes.", "hm, {x}", [])
    assert parse("</think>", ["hm", "</think>", "Yes."], in_reasoning=True) == ("Yes.", "hm", [])
    assert parse("<think>", ["hm, cut o"], in_reasoning=True) == ("", "hm, cut o", [])
    assert parse("<think>", ["Say <think>!</think>"]) == ("Say <think>!</think>", "", [])  # not at the beginning
    assert parse("nothing known", ["<think>hm</think> Yes"]) == ("<think>hm</think> Yes", "", [])
    both = "<think>hm <tool_call></think>\n<tool_call>" + NAMED + "</tool_call>"
    assert parse("<think> <tool_call>", list(both)) == ("", "hm <tool_call>", [WEATHER])
    again = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    again += "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant" + FAMILIES["gpt-oss"][1]
    assert parse("<|channel|>", list(again)) == ("I look.", "ab", [WEATHER, ("now", {})])


FRAGMENTS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|channel|>", "<|end|>", "<|message|>", "{"]
FRAGMENTS += [
    '{"name": "now", "arguments": {}}',
    "analysis",
    "commentary to=functions.now ",
    " ",
    "\n",
    "a",
    "<",
    "[ARGS]",
    "}",
]
TEMPLATES = ["<tool_call> <think>", "[TOOL_CALLS] [THINK]", "<|channel|>", FAMILIES["llama"][0], "<tool_call> <arg_key>", ""]
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists)


@given(
    st.lists(st.sampled_from(FRAGMENTS), max_size=14).map("".join),
    st.sampled_from(TEMPLATES),
    st.lists(st.integers(1, 9), min_size=1),
    st.booleans(),
)
def test_the_result_does_not_depend_on_the_pieces(text, template, lengths, in_reasoning):
    pieces, position = [], 0
    while position < len(text):
        pieces.append(text[position : position + lengths[len(pieces) % len(lengths)]])
        position += len(pieces[-1])
    in_reasoning = in_reasoning and find_reasoning_format(template) is not None
    expected = parse(template, [text], in_reasoning=in_reasoning)
    assert parse(template, pieces, in_reasoning=in_reasoning) == expected
    if not template:
        assert expected == (text, "", [])


@given(st.text(max_size=40), st.sampled_from([template for template, _ in FAMILIES.values()]))
def test_text_without_tags_is_content(text, template):
    content, reasoning, calls = parse(template, list(text))
    if not any(c in text for c in "<[{"):
        assert (content, reasoning, calls) == (text.lstrip() if text.strip() or not text else content, "", [])


@pytest.mark.slow
@settings(max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@given(st.dictionaries(st.text(max_size=8), VALUES))
def test_arguments_of_any_type(arguments):
    for family in ("hermes", "mistral", "deepseek 3.1", "gpt-oss"):
        template, text = FAMILIES[family]
        answer = text.replace(OBJECT, json.dumps(arguments))
        assert parse(template, [answer])[2][0] == ("weather", arguments)


def test_special_tokens_in_tags():
    special = [("[TOOL_CALLS]", 1), ("[ARGS]", 2), ("<|im_end|>", 3), ("<|end|>", 4), ("<|message|>", 5)]
    assert special_tokens_in_tags(find_tool_format("[TOOL_CALLS]").tags, special) == {1, 2}
    assert special_tokens_in_tags(find_reasoning_format("<|channel|>").tags, special) == {4, 5}


def test_the_form_of_calls_that_a_template_expects():
    loop = "{%% for m in messages %%}{%% if m.tool_calls %s %%}{%% for c in m.tool_calls %%}%s{%% endfor %%}{%% else %%}%s"
    loop += "{%% endif %%}{%% endfor %%}{{ tools }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    for condition, call_text, other, expected in (
        ("", "{{ c.function.arguments | tojson }}", "{{ m.content }}", '{"a": "é"}'),
        ("", "{{ c.function.arguments.items() | list | length }}", "", "1"),
        ("", "{{ 'x' + c.function.arguments }}", "{{ m.content }}", 'x{"a": "é"}'),
        ("and m.content is none", "{{ c.function.arguments | tojson }}", "{{ m.content }}", '{"a": "é"}'),
    ):
        renderer = PromptRenderer(ChatTemplate(loop % (condition, call_text, other)))
        assert renderer.supports_tools
        assert renderer.render(messages, {"tools": []}) == expected + "[]"
    for without in ("tools {{ messages[0].tools }}", "{{ 'no \\'tools' }}{# tools #}", "{{ tools_in_user_message }}"):
        assert not PromptRenderer(ChatTemplate(without)).supports_tools
    text = "{{ 'a' }}{%- if not tools is defined %}{% set tools = none %}{% endif %}"
    assert PromptRenderer(ChatTemplate(text)).supports_tools
