"""rope_parameters of a config.json from a GGUF: keys rope.*, and tensors of frequency factors."""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import numpy as np

from .facts import Facts, part_of, shortest


def rope_parameters(facts: Facts) -> list[dict[str, Any]]:
    """Candidates: one set of settings, with and without the part of each head that is rotated; sets for layers with and without
    a window; sets of DeepSeek-V4's two kinds of layers."""
    theta = facts.key("rope.freq_base")
    if theta is None:
        return []
    dim, head = facts.key("rope.dimension_count"), facts.head_dim
    is_part = dim and head and dim < head and not facts.key("attention.kv_lora_rank")  # heads of latents have two parts
    rotary: dict[str, Any] = {"partial_rotary_factor": part_of(dim, head)} if is_part else {}
    settings = [{"rope_theta": theta, **scaling} for scaling in _scalings(facts)]
    local_theta = facts.key("rope.freq_base_swa")
    local: dict[str, Any] = {"rope_type": "default", "rope_theta": theta if local_theta is None else local_theta}
    local_dim = facts.key("rope.dimension_count_swa")
    local_rotary = {"partial_rotary_factor": part_of(local_dim, head)} if local_dim and head and local_dim < head else {}
    whole = {"partial_rotary_factor": 1.0}  # where the model's own default is a part
    flat = [{**each, **part} for part in ([rotary, {}] if rotary else [{}, whole]) for each in settings]
    by_window = [
        {"full_attention": each, "sliding_attention": {**local, **part}}
        for each in [*flat, *_proportional(facts, theta)]
        for part in ([local_rotary, rotary, {}] if local_rotary or rotary else [{}])
    ]
    compress = facts.key("attention.compress_rope_freq_base")
    if compress is not None:
        plain = {"rope_type": "default", "rope_theta": theta}
        whole = {"rope_theta": compress, "attention_factor": 1.0}  # which is what all programs take for this architecture
        return [
            {"main": {**plain, **part}, "compress": {**each, **whole, **part}} for each in settings for part in (rotary, {})
        ]
    is_split = local_theta is not None or (facts.architecture == "olmo2" and facts.key("attention.sliding_window") is not None)
    return [*by_window, *flat] if is_split else [*flat, *by_window]


def _proportional(facts: Facts, theta: float) -> list[dict[str, Any]]:
    """Of global layers that rotate their first pairs only, as the tensor of factors says (Gemma 4)."""
    factors = facts.values("rope_freqs.weight")
    if factors is None or not (factors > 1e20).any():
        return []
    return [{"rope_type": "proportional", "rope_theta": theta, "partial_rotary_factor": float((factors == 1).mean())}]


def _scalings(facts: Facts) -> list[dict[str, Any]]:
    """The settings without rope_theta."""
    name, factor = facts.key("rope.scaling.type"), facts.key("rope.scaling.factor")
    original = facts.key("rope.scaling.original_context_length")
    long, short = facts.values("rope_factors_long.weight"), facts.values("rope_factors_short.weight")
    if long is not None and short is not None:
        return [_longrope(facts, original, long, short)]
    beta = facts.key("attention.temperature_scale")
    extra = {} if beta is None or original is None else {"llama_4_scaling_beta": beta}
    if name == "linear":
        return [{"rope_type": "linear", "factor": factor}]
    if name == "yarn":
        settings = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original} | extra
        return [settings | more for more in _yarn(facts)]
    if name == "none" and factor == 1.0 and original:
        return [*_dynamic(facts), {"rope_type": "default"}]
    if extra:
        extra |= {"original_max_position_embeddings": original}
    plain: list[dict[str, Any]] = [{"rope_type": "default"} | extra]
    factors = facts.values("rope_freqs.weight")
    if factors is not None and factors.max() < 1e20:
        plain = [*_llama3(facts, factors), *plain]
    sections = facts.key("rope.dimension_sections")
    if sections:
        mrope = {"mrope_section": sections[:3]}
        return [{**each, **mrope, **more} for each in plain for more in ({"mrope_interleaved": True}, {})]
    return plain


def _longrope(facts: Facts, original: int | None, long: np.ndarray, short: np.ndarray) -> dict[str, Any]:
    values = {"rope_type": "longrope", "original_max_position_embeddings": original}
    values |= {"long_factor": [shortest(v) for v in long], "short_factor": [shortest(v) for v in short]}
    attention = facts.key("rope.scaling.attn_factor")
    if attention is not None:
        values["attention_factor"] = values["long_mscale"] = values["short_mscale"] = attention
    return values


def _yarn(facts: Facts) -> list[dict[str, Any]]:
    """Settings of YaRN beyond factor and original context: how the ramp's ends are rounded, and the magnitude."""
    betas = {f"beta_{end}": facts.key(f"rope.scaling.yarn_beta_{end}") for end in ("fast", "slow")}
    betas = {name: value for name, value in betas.items() if value is not None}
    truncate = facts.key("rope.scaling.yarn_truncate")
    if facts.architecture == "gpt-oss":
        betas["truncate"] = bool(truncate)
    elif truncate is False:
        betas["truncate"] = False
    multiplier, attention = facts.key("rope.scaling.yarn_log_multiplier"), facts.key("rope.scaling.attn_factor")
    factor = facts.key("rope.scaling.factor")
    implied = 1.0 + 0.1 * math.log(factor) if factor and factor > 1 else 1.0
    magnitudes: list[dict[str, Any]] = [{}]
    if multiplier is not None:
        tenfold = shortest(multiplier * 10)
        magnitudes = [{"mscale": 1.0, "mscale_all_dim": multiplier}] if facts.architecture == "mistral3" else []
        magnitudes += [{"mscale": tenfold, "mscale_all_dim": tenfold}, {"mscale": 1.0, "mscale_all_dim": tenfold}]
    if attention is not None:
        magnitudes = [{**each, "attention_factor": attention * implied} for each in magnitudes]
    return [betas | each for each in magnitudes]


def _dynamic(facts: Facts) -> list[dict[str, Any]]:
    """A base that was enlarged by alpha ** (d / (d - 2)) (Hunyuan)."""
    theta, dim = facts.key("rope.freq_base"), facts.head_dim
    if dim < 4 or theta <= 10000:
        return []
    alpha = (theta / 10000.0) ** ((dim - 2) / dim)
    rounded = float(f"{alpha:.5g}")
    return [{"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": value, "factor": 1.0} for value in (rounded, alpha)]


def _llama3(facts: Facts, factors: np.ndarray) -> list[dict[str, Any]]:
    """Llama 3.1's four settings from the divisors of the frequencies: what is written is checked against the tensor, so that
    round numbers are tried first."""
    theta, factor = facts.key("rope.freq_base"), shortest(factors.max())
    if factor <= 1:
        return []
    ends = [facts.key("rope.scaling.original_context_length"), *(1 << n for n in range(3, 21))]
    found: list[dict[str, Any]] = []
    for count in (len(factors), len(factors) // 2):  # the rest of a tensor for layers that rotate half of each head is 1
        if (factors[count:] != 1).any():
            continue
        cycles = theta ** -(np.arange(count) / count) / (2 * np.pi)
        rounded = []
        for original, (low, high) in product([e for e in ends if e], ((1.0, 4.0), (1.0, 1.0), (1.0, 2.0), (1.0, 8.0))):
            at = original * cycles
            part = np.clip((at - low) / (high - low), 0, 1) if low < high else np.where(at < low, 0.0, 1.0)
            if np.allclose(1.0 / ((1.0 - part) / factor + part), factors[:count], rtol=1e-5):
                settings = {"original_max_position_embeddings": original, "low_freq_factor": low, "high_freq_factor": high}
                rounded.append(settings)
        found += rounded or _solved(factors[:count], cycles, factor)
    return [{"rope_type": "llama3", "factor": factor, **each} for each in found]


def _solved(factors: np.ndarray, cycles: np.ndarray, factor: float) -> list[dict[str, Any]]:
    """By the line that the divisors of the middle frequencies lie on; a factor common to the three settings is free."""
    part = (1.0 / factors - 1.0 / factor) / (1.0 - 1.0 / factor)
    middle = (part > 1e-4) & (part < 1 - 1e-4)
    if middle.sum() < 2:
        return []
    slope, offset = np.polyfit(cycles[middle], part[middle], 1)
    width = 1.0 / -offset if offset < 0 else math.inf
    if not math.isfinite(width):
        return []
    return [
        {
            "original_max_position_embeddings": round(slope * width),
            "low_freq_factor": 1.0,
            "high_freq_factor": float(f"{1 + width:.4g}"),
        }
    ]
