"""The settings that an answer is generated with, under the names that llama-server shows them by."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ...generation.sampling import Sampling
from ..checks import JsonObject

_RENAMED = {"temp": "temperature"}
_RANDOM_SEED = 0xFFFFFFFF  # llama.cpp's number for one


def shown_settings(options: Mapping[str, Any], *, stream: bool = False, n_probs: int = 0) -> JsonObject:
    """The settings of /props and /slots. options: keyword arguments of `generate`; what they lack has its default."""
    chosen = {field.name: options.get(field.name, field.default) for field in fields(Sampling) if field.name != "logit_bias"}
    chosen["seed"] = _RANDOM_SEED if chosen["seed"] is None else chosen["seed"]
    chosen |= {name: list(chosen[name]) for name in ("dry_sequence_breakers", "samplers")}
    n_predict = options.get("n_predict", -1)
    return {
        **{_RENAMED.get(name, name): value for name, value in chosen.items()},
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
