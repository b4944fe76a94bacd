"""What is thought, said and called in an answer, by forms that a template's text gives away."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("starlette")
from ggufmill.runtime.serve.history import History
from ggufmill.runtime.serve.stream_parser import Speech
from ggufmill.runtime.serve.tool_formats import calls_of, shown, thoughts_of
from ggufmill.runtime.text.chat import ChatTemplate

FUNCTIONS = {
    "weather": {"properties": {"city": {"type": "string"}, "days": {"type": "integer"}, "more": {"type": "object"}}},
    "now": {"properties": {}},
}
WEATHER = ("weather", {"city": 'São "P"', "days": 3, "more": {"a": [1, None]}})
OBJECT = '{"city": "S\\u00e3o \\"P\\"", "days": 3, "more": {"a": [1, null]}}'
NAMED = f'{{"name": "weather", "arguments": {OBJECT}}}'

# What a family's template contains, and how its models write a call of `weather` and then one of `now`.
FORMS = {
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


def hear(template, pieces, tools=True, thinking=False):
    """(what was said, what was thought, calls, finished deltas)"""
    speech = Speech(thoughts_of(template), calls_of(template) if tools else None, FUNCTIONS, thinking)
    deltas = [delta for piece in pieces for delta in speech.hear(piece)] + speech.end()
    said, thought = ("".join(d.get(key, "") for d in deltas) for key in ("content", "reasoning_content"))
    calls = [call for d in deltas for call in d.get("tool_calls", ())]
    assert [call["index"] for call in calls] == list(range(speech.called))
    assert all(call["type"] == "function" and call["id"] for call in calls)
    assert len({call["id"] for call in calls}) == len(calls)
    return said, thought, [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls]


@pytest.mark.parametrize("family", FORMS)
def test_calls_of_each_family(family):
    template, text = FORMS[family]
    for pieces in ([text], list(text), [text[i : i + 7] for i in range(0, len(text), 7)]):
        assert hear(template, pieces) == ("", "", [WEATHER, ("now", {})])
    if not family.startswith("llama"):
        assert hear(template, ["Let me see.\n", text]) == ("Let me see.", "", [WEATHER, ("now", {})])
    assert hear(template, [text], tools=False)[2] == []


@pytest.mark.parametrize("family", FORMS)
def test_what_is_no_call_stays_text(family):
    template, text = FORMS[family]
    begin = calls_of(template).begins[0]
    broken = (
        f"{begin}",
        f"{begin} and so on, {{",
        text[: text.index("null")],  # cut off
        f'{begin}{{"name": 5, "arguments": {{}}}}',
        f'{begin}{{"name": "weather", "arguments": [1]}}',
        f'{begin}{{"name": "weather", "arguments": {{"a": NaN}}}}',
        f'{begin}{{"name": "weather", "arguments": "{{"}}',
        begin + "[" * 5000,
    )
    for wrong in broken:
        said, thought, calls = hear(template, [wrong])
        assert (thought, calls) == ("", []), wrong[:200]
        left_out = thoughts_of(template).left_out if thoughts_of(template) else ()
        for mark in left_out:
            wrong, said = wrong.replace(mark, ""), said.replace(mark, "")
        assert said.strip() == wrong.strip()


def test_only_functions_that_there_are_where_nothing_else_tells_calls_from_text():
    template, _ = FORMS["llama"]
    for text in ('{"name": "Bob", "parameters": {}}', '{"answer": 42}', 'As JSON: {"name": "now", "parameters": {}}'):
        assert hear(template, list(text)) == (text, "", [])


def test_a_call_is_told_as_soon_as_it_is_complete():
    template, _ = FORMS["hermes"]
    speech = Speech(None, calls_of(template), FUNCTIONS)
    assert speech.hear('<tool_call>{"name": "now", "arguments": {"a": "</tool_') == []
    assert speech.hear('call>"}}</tool_') == []  # the mark within a text is no end
    assert speech.hear("call>")[0]["tool_calls"][0]["function"] == {"name": "now", "arguments": '{"a": "</tool_call>"}'}
    assert speech.hear("And") == [{"content": "And"}]


def test_thoughts():
    for template, text in (
        ("<think>", "<think>\nhm, {x}\n</think>\n\nYes."),
        ("[THINK]", "[THINK]hm, {x}[/THINK]Yes."),
        ("<seed:think>", "<seed:think>hm, {x}</seed:think>Yes."),
        (
            "<|channel|>",
            "<|channel|>analysis<|message|>hm, {x}<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
        ),
        ("<|START_THINKING|>", "<|START_THINKING|>hm, {x}<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>"),
    ):
        for pieces in ([text], list(text)):
            assert hear(template, pieces) == ("Yes.", "hm, {x}", [])
    assert hear("</think>", ["hm", "</think>", "Yes."], thinking=True) == ("Yes.", "hm", [])
    assert hear("<think>", ["hm, cut o"], thinking=True) == ("", "hm, cut o", [])
    assert hear("<think>", ["Say <think>!</think>"]) == ("Say <think>!</think>", "", [])  # not at the beginning
    assert hear("nothing known", ["<think>hm</think> Yes"]) == ("<think>hm</think> Yes", "", [])
    both = "<think>hm <tool_call></think>\n<tool_call>" + NAMED + "</tool_call>"
    assert hear("<think> <tool_call>", list(both)) == ("", "hm <tool_call>", [WEATHER])
    again = "<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>commentary<|message|>I look.<|end|>"
    again += "<|start|>assistant<|channel|>analysis<|message|>b<|end|><|start|>assistant" + FORMS["gpt-oss"][1]
    assert hear("<|channel|>", list(again)) == ("I look.", "ab", [WEATHER, ("now", {})])


MARKS = ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "<|channel|>", "<|end|>", "<|message|>", "{"]
MARKS += ['{"name": "now", "arguments": {}}', "analysis", "commentary to=functions.now ", " ", "\n", "a", "<", "[ARGS]", "}"]
TEMPLATES = ["<tool_call> <think>", "[TOOL_CALLS] [THINK]", "<|channel|>", FORMS["llama"][0], "<tool_call> <arg_key>", ""]
VALUES = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists)


@given(
    st.lists(st.sampled_from(MARKS), max_size=14).map("".join),
    st.sampled_from(
        ["<tool_call> <think>", "[TOOL_CALLS] [THINK]", "<|channel|>", FORMS["llama"][0], "<tool_call> <arg_key>", ""]
    ),
    st.lists(st.integers(1, 9), min_size=1),
    st.booleans(),
)
def test_it_does_not_matter_how_a_text_is_cut(text, template, steps, thinking):
    pieces, at = [], 0
    while at < len(text):
        pieces.append(text[at : at + steps[len(pieces) % len(steps)]])
        at += len(pieces[-1])
    thinking = thinking and thoughts_of(template) is not None
    whole = hear(template, [text], thinking=thinking)
    assert hear(template, pieces, thinking=thinking) == whole
    if not template:
        assert whole == (text, "", [])


@given(st.text(max_size=40), st.sampled_from([template for template, _ in FORMS.values()]))
def test_other_texts_go_through(text, template):
    said, thought, calls = hear(template, list(text))
    if not any(c in text for c in "<[{"):
        assert (said, thought, calls) == (text.lstrip() if text.strip() or not text else said, "", [])


@given(
    st.dictionaries(
        st.text(max_size=8), st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=9), st.lists)
    )
)
def test_any_arguments_come_through(arguments):
    for family in ("hermes", "mistral", "deepseek 3.1", "gpt-oss"):
        template, text = FORMS[family]
        written = text.replace(OBJECT, json.dumps(arguments))
        assert hear(template, [written])[2][0] == ("weather", arguments)


def test_tokens_that_marks_are_made_of():
    special = [("[TOOL_CALLS]", 1), ("[ARGS]", 2), ("<|im_end|>", 3), ("<|end|>", 4), ("<|message|>", 5)]
    assert shown(calls_of("[TOOL_CALLS]").marks, special) == {1, 2}
    assert shown(thoughts_of("<|channel|>").marks, special) == {4, 5}


def test_how_a_template_wants_to_be_told_of_calls():
    loop = "{%% for m in messages %%}{%% if m.tool_calls %s %%}{%% for c in m.tool_calls %%}%s{%% endfor %%}{%% else %%}%s"
    loop += "{%% endif %%}{%% endfor %%}{{ tools }}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": "é"}'}}
    messages = [{"role": "assistant", "content": "", "tool_calls": [call]}]
    for condition, written, other, text in (
        ("", "{{ c.function.arguments | tojson }}", "{{ m.content }}", '{"a": "é"}'),
        ("", "{{ c.function.arguments.items() | list | length }}", "", "1"),
        ("", "{{ 'x' + c.function.arguments }}", "{{ m.content }}", 'x{"a": "é"}'),
        ("and m.content is none", "{{ c.function.arguments | tojson }}", "{{ m.content }}", '{"a": "é"}'),
    ):
        history = History(ChatTemplate(loop % (condition, written, other)))
        assert history.tools
        assert history.render(messages, {"tools": []}) == text + "[]"
    for without in ("tools {{ messages[0].tools }}", "{{ 'no \\'tools' }}{# tools #}", "{{ tools_in_user_message }}"):
        assert not History(ChatTemplate(without)).tools
    assert History(ChatTemplate("{{ 'a' }}{%- if not tools is defined %}{% set tools = none %}{% endif %}")).tools
