"""How much each field of each API's requests may hold. A field that is not here is not read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ....request_fields import fields_of
from ...generation.grammar import MAX_GRAMMAR_LENGTH
from ...generation.sampling_options import Sampling


class Limit(NamedTuple):
    """What a field may hold, all that is nested in it counted.

    characters  of all texts and of the names of objects; None: as many as the body of a request may have
    values      texts, numbers, lists, objects; depth: levels of them, 1 for a text or a number
    has_tokens  it may hold token ids, as many as a request's prompts may have, beyond `values`
    """

    characters: int | None
    values: int
    depth: int
    has_tokens: bool = False


Limits = Mapping[str, Limit]

# A single value. A short list or object is let through to the check of the field, which says what it has to be instead.
_VALUE = Limit(1024, 16, 4)
_TEXT = Limit(None, 16, 4)
_PROMPT = Limit(None, 1024, 4, has_tokens=True)
_MESSAGES = Limit(None, 1 << 16, 64)
_TOOLS = Limit(1 << 20, 1 << 16, 64)
_SCHEMA = Limit(MAX_GRAMMAR_LENGTH, 1 << 14, 64)
_TEXTS = Limit(None, 1 << 13, 4, has_tokens=True)  # up to 2048, or token ids
_METADATA = Limit(1 << 14, 64, 4)
_NAMES = Limit(1 << 12, 128, 4)
_STOP = Limit(1 << 17, 64, 4)  # 16 of 4096 characters

_SAMPLING = {
    "logit_bias": Limit(1 << 16, 1 << 14, 4),
    "samplers": Limit(1 << 10, 32, 4),
    "dry_sequence_breakers": Limit(1 << 12, 64, 4),
}


def _sampling_limits() -> dict[str, Limit]:
    """Of the fields of `Sampling`: those that are no numbers have to be in the table."""
    return {
        each.option.json or each.name: _VALUE if each.type.startswith(("int", "float")) else _SAMPLING[each.name]
        for each in fields_of(Sampling)
    }


def _each(limit: Limit, names: str) -> dict[str, Limit]:
    return dict.fromkeys(names.split(), limit)


_GENERATION = {
    **_sampling_limits(),
    **_each(_VALUE, "model user n stream logprobs top_logprobs id_slot ignore_eos max_tokens max_completion_tokens n_predict"),
    **_each(_VALUE, "stream_options functions tool_choice audio modalities"),
    **_each(_SCHEMA, "response_format grammar json_schema"),
    "stop": _STOP,
    "tools": _TOOLS,
}

CHAT: Limits = {
    **_GENERATION,
    "messages": _MESSAGES,
    **_each(_VALUE, "parallel_tool_calls reasoning_format reasoning_effort"),
    "chat_template_kwargs": Limit(1 << 16, 1 << 10, 16),
}
COMPLETION: Limits = {**_GENERATION, "prompt": _PROMPT, "suffix": _TEXT, **_each(_VALUE, "echo best_of")}
LLAMA_COMPLETION: Limits = {
    **COMPLETION,
    **_each(_VALUE, "n_probs post_sampling_probs return_tokens cache_prompt timings_per_token return_progress"),
    "response_fields": _NAMES,
}
INFILL: Limits = {**LLAMA_COMPLETION, **_each(_TEXT, "input_prefix input_suffix"), "input_extra": _MESSAGES}
ANTHROPIC: Limits = {
    **CHAT,
    "system": _MESSAGES,
    "stop_sequences": _STOP,
    "thinking": _VALUE,
    "metadata": _METADATA,
}
RESPONSES: Limits = {
    **CHAT,
    "input": _MESSAGES,
    "instructions": _TEXT,
    "text": _SCHEMA,
    "metadata": _METADATA,
    **_each(
        _VALUE, "reasoning max_output_tokens previous_response_id conversation background prompt truncation max_tool_calls"
    ),
}
EMBEDDINGS: Limits = {
    **_each(_TEXTS, "input content"),
    **_each(_VALUE, "encoding_format pooling dimensions embd_normalize model user"),
}
RERANK: Limits = {"documents": _TEXTS, "query": _TEXT, **_each(_VALUE, "return_documents top_n model")}
TOKENIZE: Limits = {
    **_each(_PROMPT, "content prompt"),
    **_each(_VALUE, "add_special add_special_tokens parse_special with_pieces model"),
}
DETOKENIZE: Limits = {"tokens": _PROMPT, "model": _VALUE}
SLOT: Limits = _each(_VALUE, "filename model")
MODEL: Limits = {"model": _VALUE}
