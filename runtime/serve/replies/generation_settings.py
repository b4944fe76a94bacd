"""The settings that an answer is generated with, under the names that llama-server shows them by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ....request_fields import fields_of
from ...generation.sampling_options import Sampling
from ..requests.checks import JsonObject

_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's number for one


def shown_settings(options: Mapping[str, Any], *, stream: bool = False, n_probs: int = 0) -> JsonObject:
    """The settings of /props and /slots. options: keyword arguments of `generate`; what they lack has its default."""
    shown = [field for field in fields_of(Sampling) if field.name != "logit_bias"]
    chosen = {field.option.json or field.name: options.get(field.name, field.default) for field in shown}
    chosen["seed"] = _RANDOM_SEED if chosen["seed"] is None else chosen["seed"]
    chosen |= {name: list(chosen[name]) for name in ("dry_sequence_breakers", "samplers")}
    n_predict = options.get("n_predict", -1)
    return {
        **chosen,
        "max_tokens": n_predict,
        "n_predict": n_predict,
        "n_keep": 0,
        "n_discard": 0,
        "ignore_eos": bool(options.get("ignore_eos", False)),
        "stream": stream,
        "n_probs": n_probs,
        "min_keep": 0,
        "speculative.n_max": options.get("draft_max", 0),
        "timings_per_token": False,
        "post_sampling_probs": bool(options.get("post_sampling", False)),
        "lora": [],
    }


def request_settings(options: Mapping[str, Any], grammar: str, *, stream: bool, n_probs: int) -> JsonObject:
    """The settings in an answer of /completion. options: as of `shown_settings`, with biases by token."""
    biases = [{"token": token, "bias": bias} for token, bias in (options.get("logit_bias") or {}).items()]
    return {
        **shown_settings(options, stream=stream, n_probs=n_probs),
        "stop": list(options.get("stop", ())),
        "logit_bias": [each for each in biases if each["bias"] > -float("inf")],  # JSON has no infinity
        "grammar": grammar,
    }
