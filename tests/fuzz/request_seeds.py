"""Bodies of requests."""

import json

_SAID = [
    {"role": "system", "content": "x"},
    {"role": "user", "content": [{"type": "text", "text": "y"}, {"type": "refusal", "refusal": "z"}]},
    {"role": "assistant", "content": None, "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]},
    {"role": "tool", "content": "5", "tool_call_id": "1"},
]


_FUNCTION = {"type": "function", "function": {"name": "f", "description": "x", "parameters": {"type": "object"}}}


_OPTIONS = {
    "model": "m",
    "max_tokens": 5,
    "stop": ["a"],
    "temperature": 0.5,
    "top_p": 0.5,
    "top_k": 4,
    "min_p": 0.1,
    "seed": 5,
    "presence_penalty": 0.5,
    "repeat_last_n": -1,
    "stream": True,
    "stream_options": {"include_usage": True},
    "ignore_eos": False,
    "n": 1,
    "tools": [],
    "user": "x",
}


REQUESTS = [
    json.dumps(
        {"messages": _SAID, **_OPTIONS, "logprobs": True, "top_logprobs": 3}
        | {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "low", "reasoning_format": "auto"}
        | {"tools": [_FUNCTION], "tool_choice": "auto", "parallel_tool_calls": False}
    ).encode(),
    json.dumps({"prompt": "x", **_OPTIONS, "logprobs": 2}).encode(),
    json.dumps({"prompt": [1, 2], "max_tokens": -1, "n_predict": 3}).encode(),
]
