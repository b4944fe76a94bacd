import dataclasses

import numpy as np
import pytest

from ggufmill.formats import MillError, PlanError
from ggufmill.runtime import Tokenizer, generate, load_model
from ggufmill.runtime.text.chat import BUILT_IN, ChatTemplate, Conversation, find_template, prompt_tokens

SPECIALS = {"bos_token": "<s>", "eos_token": "</s>"}
MESSAGES = [
    {"role": "system", "content": "Be <b>brief</b>."},
    {"role": "user", "content": "  Hello, Zoë & co? "},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nHi!"},
    {"role": "user", "content": "And 2 + 2?"},
]
TOOLS = [{"type": "function", "function": {"name": "add", "description": "a < b & 'ü'", "parameters": {"type": "object"}}}]

# The Jinja features that the templates of supported families use, each family in a few lines
FAMILIES = {
    "llama-3.1": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%Y") %}
    {%- else %}{%- set date_string = "26 Jul" %}{%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n\\n" }}{%- endfor %}
{%- endif %}
{{- system_message + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}""",
    "qwen3": """{%- if tools %}
    {{- '<|im_start|>system\\n' }}{%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(multi_step_tool=true, last_query_index=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if ns.multi_step_tool and message.role == "user" and message.content is string %}
        {%- set ns.multi_step_tool = false %}
        {%- set ns.last_query_index = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\\n') %}
        {%- if loop.index0 > ns.last_query_index %}{%- set content = message.content %}{%- endif %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}""",
    "deepseek-r1": """{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{%- set ns = namespace(system='') -%}
{%- for m in messages if m['role'] == 'system' -%}{%- set ns.system = ns.system + m['content'] -%}{%- endfor -%}
{{ bos_token }}{{ ns.system }}
{%- for m in messages -%}
  {%- if m['role'] == 'user' -%}{{ '<｜User｜>' + m['content'] }}
  {%- elif m['role'] == 'assistant' -%}
    {%- set text = m['content'] -%}
    {%- if '</think>' in text -%}{%- set text = text.split('</think>')[-1] -%}{%- endif -%}
    {{ '<｜Assistant｜>' + text + '<｜end▁of▁sentence｜>' }}
  {%- endif -%}
{%- endfor -%}
{% if add_generation_prompt %}{{ '<｜Assistant｜><think>\\n' }}{% endif %}""",
    "mistral": """{{ bos_token }}{% set n = 0 %}
{% if messages[0].role == 'system' %}{% set first = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{% for message in messages %}
  {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
    {{ raise_exception('roles must alternate user/assistant') }}
  {% endif %}
  {% if message.role == 'user' %}
    {% if loop.last and first is defined %}{{ '[INST] ' + first + '\\n\\n' + message.content + '[/INST]' }}
    {% else %}{{ '[INST] ' + message.content + '[/INST]' }}{% endif %}
  {% else %}{{ ' ' + message.content + eos_token }}{% endif %}
{% endfor %}""",
    "gemma": """{{ bos_token }}{% for message in messages %}{% if message.role == 'system' %}{% continue %}{% endif %}
{% if message['role'] == 'assistant' %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}""",
    "gpt-oss": """{%- macro render(tool) -%}
    {{- "// " + tool.description + "\\n" -}}
    {{ "type " + tool.name + " = (_: " -}}{{ tool.parameters | tojson -}}{{ ") => any;" }}
{%- endmacro -%}
{{- "<|start|>system<|message|>Reasoning: " + (reasoning_effort | default("medium")) + "<|end|>" }}
{%- if tools %}{%- for tool in tools %}{{ render(tool.function) }}{%- endfor %}{%- endif %}
{%- for message in messages -%}
    {%- if message.role == 'assistant' -%}
        {%- if 'thinking' in message and loop.last %}{{ message.thinking }}{% endif %}
        {%- generation %}{{- "<|start|>assistant<|channel|>final<|message|>" + message.content + "<|end|>" }}{% endgeneration %}
    {%- else -%}
        {{- "<|start|>" + message.role + "<|message|>" + message.content + "<|end|>" }}
    {%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}<|start|>assistant{%- endif -%}""",
    "glm-4": """[gMASK]<sop>
{%- for m in messages %}
{%- if m.role == 'user' %}<|user|>
{% set content = m.content %}{{ content if content is string else content | map(attribute='text') | join('\n') }}
{%- elif m.role == 'assistant' %}<|assistant|>
{{ (m.content.split('</think>') | last).strip() }}
{%- else %}<|{{ m.role }}|>
{{ m.content }}{% endif %}
{%- if loop.index > 20 %}{% break %}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>
{{- '\n<think></think>' if (enable_thinking is defined and not enable_thinking) else '' }}{% endif %}""",
    "kimi": """{%- for message in messages -%}
  {%- if loop.first and messages[0]['role'] != 'system' -%}<|im_system|>system<|im_middle|>You are Kimi<|im_end|>{%- endif -%}
  {%- set name = message.get('name') or message['role'] -%}
  {{ {'user': '<|im_user|>', 'assistant': '<|im_assistant|>'}.get(message.role, '<|im_system|>') }}{{ name }}<|im_middle|>
  {{- message['content'] }}<|im_end|>
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_assistant|>assistant<|im_middle|>{%- endif -%}""",
}


@pytest.mark.parametrize("name", [*FAMILIES, *BUILT_IN])
def test_rendered_text_is_that_of_transformers(name):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer as TokenizerBackend
    from tokenizers import models
    from transformers import PreTrainedTokenizerFast

    text = FAMILIES.get(name) or BUILT_IN[name]
    reference = PreTrainedTokenizerFast(tokenizer_object=TokenizerBackend(models.BPE()), chat_template=text, **SPECIALS)
    template = ChatTemplate(text, SPECIALS)
    for messages in (MESSAGES, MESSAGES[1:], MESSAGES[:2], MESSAGES[:3]):
        for options in ({}, {"tools": TOOLS}, {"enable_thinking": False}, {"add_generation_prompt": False}):
            variables = {"add_generation_prompt": True} | options
            expected = reference.apply_chat_template(messages, tokenize=False, **variables)
            assert template.render(messages, **variables) == expected
            assert "Hello, Zoë & co?" in expected


REASONING = """{%- for m in messages %}[{{ m.role }}|{{ m.thinking is defined and m.thinking }}|
{{- m.reasoning_content is defined and m.reasoning_content }}|{{ m.content }}]{% endfor %}"""
NAMED_REASONING = [
    {"role": "assistant", "content": "4", **dict.fromkeys(names, "sum")}
    for names in ((), ("reasoning_content",), ("reasoning",), ("thinking",), ("thinking", "reasoning"))
]


def test_reasoning_reaches_templates_under_the_names_that_they_read():
    """gpt-oss and LFM2 read `thinking`, most others `reasoning_content`, which is what the server answers with."""
    rendered = ChatTemplate(REASONING).render(NAMED_REASONING)
    assert rendered == "[assistant|False|False|4]" + 4 * "[assistant|sum|sum|4]"
    differing = {"role": "assistant", "content": "4", "reasoning_content": "a", "thinking": "b", "reasoning": None}
    assert ChatTemplate(REASONING).render([differing]) == "[assistant|b|a|4]"


def test_names_of_reasoning_are_those_of_transformers():
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    if not hasattr(utils, "_alias_reasoning_fields"):
        pytest.skip("this version of transformers knows one name only")
    differing = {"role": "assistant", "content": "4", "reasoning_content": "a", "thinking": "b", "reasoning": "c"}
    chat = [*NAMED_REASONING, differing, differing | {"reasoning_content": None}, MESSAGES[0]]
    (expected,), _ = utils.render_jinja_template([chat], chat_template=REASONING)
    assert ChatTemplate(REASONING).render(chat, add_generation_prompt=False) == expected


def test_built_in_templates():
    def render(name, messages=MESSAGES[1:]):
        return ChatTemplate(BUILT_IN[name], SPECIALS).render(messages)

    assert render("chatml", MESSAGES[:2]) == (
        "<|im_start|>system\nBe <b>brief</b>.<|im_end|>\n<|im_start|>user\n  Hello, Zoë & co? <|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert render("gemma", MESSAGES[:2]) == (
        "<s><start_of_turn>user\nBe <b>brief</b>.\n\nHello, Zoë & co?<end_of_turn>\n<start_of_turn>model\n"
    )
    assert render("mistral", MESSAGES[3:]) == "<s>[INST] And 2 + 2?[/INST]"
    assert render("llama3", MESSAGES[3:]).startswith("<s><|start_header_id|>user<|end_header_id|>\n\nAnd 2 + 2?<|eot_id|>")
    for name in BUILT_IN:
        text = render(name)
        assert text.index("Hello, Zoë & co?") < text.index("Hi!") < text.index("And 2 + 2?"), name
        with pytest.raises(PlanError, match="knows no role tool"):
            render(name, [{"role": "tool", "content": "4"}])


def test_error_messages_give_the_reason():
    with pytest.raises(PlanError, match="cannot write these messages: roles must alternate"):
        ChatTemplate(FAMILIES["mistral"], SPECIALS).render([MESSAGES[1], MESSAGES[3]])
    with pytest.raises(PlanError, match="is not valid: line 2: "):
        ChatTemplate("a\n{% if %}")
    with pytest.raises(PlanError, match="cannot write these messages: TypeError"):
        ChatTemplate("{{ messages[0].content + 1 }}").render(MESSAGES)


@pytest.mark.parametrize(
    "text",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__ }}",
        "{{ dict.__init__.__globals__ }}",
        "{{ namespace.__init__.__globals__ }}",
        "{% set n = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ '{0.__class__}'.format(1) }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10 ** 9) | list }}",
    ],
)
def test_templates_cannot_reach_python_internals_or_change_messages(text):
    messages = [dict(MESSAGES[0])]
    try:
        rendered = ChatTemplate(text).render(messages)
    except PlanError:
        rendered = ""
    assert rendered == ""
    assert messages == MESSAGES[:1]


TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] + ':' + m.content + '\\n' }}{% endfor %}a:"


@pytest.fixture(scope="module")
def source(tiny):
    return dataclasses.replace(tiny, metadata=tiny.metadata | {"tokenizer.chat_template": TEMPLATE})


def test_choice_of_the_template(source):
    metadata = source.metadata | {"tokenizer.chat_template.tool_use": "T{{ eos_token }}"}
    assert find_template(metadata).render(MESSAGES[1:2]) == "<s>u:  Hello, Zoë & co? \na:"
    assert find_template(metadata, "tool_use").render([]) == "T</s>"
    assert find_template(metadata, "chatml").text == BUILT_IN["chatml"]
    assert find_template(metadata, "{{ bos_token }}!").render([]) == "<s>!"
    with pytest.raises(PlanError, match=r"no chat template 'nope' \(known: tool_use, alpaca"):
        find_template(metadata, "nope")
    del metadata["tokenizer.chat_template"]
    with pytest.raises(PlanError, match="has no chat template; it carries the named ones tool_use; choose one"):
        find_template(metadata)


def test_special_tokens_in_prompts_are_parsed_and_bos_occurs_once(source):
    tokenizer = Tokenizer(source.metadata)
    assert prompt_tokens(tokenizer, "<s>A</s>") == [0, 2 + ord("A"), 1] == prompt_tokens(tokenizer, "A</s>")
    without = Tokenizer(source.metadata | {"tokenizer.ggml.add_bos_token": False})
    assert prompt_tokens(without, "A") == [2 + ord("A")]


def test_a_conversation_reuses_the_cache_of_earlier_turns(source):
    model = load_model(source)
    greedy = {"temp": 0, "n_predict": 4}
    conversation = Conversation(model, find_template(source.metadata), system="S", **greedy)
    first = "".join(conversation.answer("one"))
    second = "".join(conversation.answer("two"))
    assert [m["content"] for m in conversation.messages] == ["S", "one", first, "two", second]
    prompt = f"<s>s:S\nu:one\na:{first}\nu:two\na:"
    expected = generate(model, prompt_tokens(model.tokenizer, prompt), **greedy)
    assert second == expected.text()
    assert (
        conversation.generation.timings.cached_tokens >= len("<s>s:S\nu:one\na:") - 3
    )  # <s> is one token, and the last one was not read
    conversation.reset()
    assert "".join(conversation.answer("one")) == first


def test_a_cancelled_answer_is_kept_as_far_as_it_was_generated(source):
    conversation = Conversation(load_model(source), find_template(source.metadata), seed=1, ignore_eos=True)
    pieces = conversation.answer("hi")
    received = [next(pieces), next(pieces)]
    conversation.cancel()
    received += list(pieces)
    assert conversation.generation.reason == "cancelled"
    assert conversation.messages[-1] == {"role": "assistant", "content": "".join(received)}
    pieces = conversation.answer("again")
    piece = next(pieces)
    pieces.close()
    assert conversation.messages[-1] == {"role": "assistant", "content": piece}


def test_the_oldest_turns_are_dropped_when_the_context_is_full(source):
    conversation = Conversation(load_model(source), find_template(source.metadata), system="SYS", n_predict=3, temp=0)
    for text in ("first", "second", "third", "fourth", "fifth"):
        list(conversation.answer(text * 2))
        assert len(conversation.session.tokens) <= 64
    assert conversation.n_dropped > 0
    assert conversation.n_dropped % 2 == 0
    assert conversation.messages[0]["content"] == "SYS"
    assert "firstfirst" not in [m["content"] for m in conversation.messages]
    assert conversation.messages[-2]["content"] == "fifthfifth"
    before = list(conversation.messages)
    with pytest.raises(MillError, match="the message does not fit"):
        list(conversation.answer("x" * 90))
    assert conversation.messages == before


def test_a_special_token_id_out_of_range_gives_an_empty_text(source):
    metadata = source.metadata | {"tokenizer.ggml.eos_token_id": np.uint32(70000)}
    assert find_template(metadata, "{{ bos_token }}|{{ eos_token }}|{{ pad_token is defined }}").render([]) == "<s>||False"
