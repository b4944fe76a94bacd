"""Rotary position embeddings: from the settings of config.json to rope.* keys of a GGUF and to tensors of frequency factors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..data_classes import dataclass
from .config import FLOAT32_MAX, FLOAT32_MIN, Config

DEFAULT_THETA = 10000.0
SCALINGS = ("default", "linear", "yarn", "llama3", "dynamic", "longrope")
OTHER_NAMES = {"su": "longrope"}  # of scalings in config.json
# general.architecture of models whose own code knows partial_rotary_factor
PARTIAL_ROTATION = (
    *("bailingmoe2", "chatglm", "glm4", "glm4moe", "gptneox", "laguna", "mellum", "mimo2", "minimax-m2", "minimax-m3"),
    *("nemotron", "phi2", "phi3", "qwen35", "qwen35moe", "qwen3next", "qwen4exp", "stablelm", "step35"),
)
# general.architecture of models that always had such factors, whose readers need no rope.scaling.type
ALWAYS_LONGROPE = ("phi3", "phimoe", "minicpm3")


@dataclass(frozen=True)
class RopeConfig:
    """The rotary embedding of a model.

    theta     base of the frequencies
    scaling   one of SCALINGS ('default' is none)
    settings  of the scaling
    fraction  of a head's elements that are rotated (partial_rotary_factor)
    """

    theta: float
    scaling: str
    settings: Config
    fraction: float = 1.0

    @property
    def factor(self) -> float:
        """The factor by which the scaling extends the context."""
        return self.settings.number("factor", positive=True)


def read_rope(config: Config, other_names: Mapping[str, str] = OTHER_NAMES) -> RopeConfig:
    """From rope_theta and rope_scaling (with `type` or `rope_type`), or from rope_parameters, which contains both.

    other_names: name in config.json -> scaling, where these differ. Raises FormatError for a scaling that cannot be converted.
    """
    values = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(values, dict) or any(isinstance(v, dict) for v in values.values()):
        raise config.error("rope_scaling or rope_parameters is not one set of settings")
    name = values.get("rope_type") or values.get("type") or "default"
    scaling = other_names.get(name, name) if isinstance(name, str) else None
    if scaling not in SCALINGS:
        raise config.error(f"rotary scaling of type {name!r:.60} cannot be converted; known are {', '.join(SCALINGS)}")
    settings = config.part(values)
    theta = settings.number("rope_theta", config.number("rope_theta", DEFAULT_THETA, positive=True), positive=True)
    outer_fraction = config.number("partial_rotary_factor", 1.0, positive=True)
    fraction = settings.number("partial_rotary_factor", outer_fraction, positive=True)
    if fraction > 1:
        raise config.error(f"partial_rotary_factor is {fraction}; at most 1 is possible")
    return RopeConfig(theta, scaling, settings, fraction)


def rope_of(architecture: str, config: Config, other_names: Mapping[str, str] = OTHER_NAMES) -> RopeConfig:
    """As `read_rope`, for a model that may not know of rotating a part of each head."""
    rope = read_rope(config, other_names)
    if rope.fraction == 1 or architecture in PARTIAL_ROTATION:
        return rope
    problem = "this model's own code does not know of rotating a part of each head: whole heads are rotated"
    config.lose(f"partial_rotary_factor is {rope.fraction:g}, but {problem}")
    return replace(rope, fraction=1.0)


def rope_scaling_keys(architecture: str, rope: RopeConfig, notes: list[str], *, latent: bool = False) -> dict[str, Any]:
    """The rope.scaling.* keys; none for 'llama3', which is stored as a tensor (`llama3_factors`).

    Raises FormatError for settings that a GGUF cannot say.
    """
    prefix = f"{architecture}.rope.scaling"
    if rope.scaling == "dynamic" and rope.settings.get("alpha") is None:
        rope.settings.lose("a GGUF has no keys for dynamic rotary scaling: texts beyond max_position_embeddings are not scaled")
    if rope.scaling not in ("linear", "yarn"):
        return {}
    keys: dict[str, Any] = {f"{prefix}.type": rope.scaling, f"{prefix}.factor": np.float32(rope.factor)}
    if rope.scaling == "yarn":
        keys[f"{prefix}.original_context_length"] = np.uint32(rope.settings.integer("original_max_position_embeddings"))
        for name, default in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            value = rope.settings.number(name, default, positive=True)
            if value != default:
                keys[f"{prefix}.yarn_{name}"] = np.float32(value)
        mscale, mscale_all_dim = (rope.settings.number(k, 0.0) for k in ("mscale", "mscale_all_dim"))
        scales_scores, implied = latent or architecture == "mistral3", _magnitude(rope.factor, 1.0)
        if rope.settings.get("attention_factor") is not None:
            # llama.cpp multiplies this key by 1 + 0.1 ln(factor), transformers uses attention_factor alone.
            keys[f"{prefix}.attn_factor"] = np.float32(rope.settings.number("attention_factor", positive=True) / implied)
        elif mscale and mscale_all_dim and not scales_scores:
            magnitude = _magnitude(rope.factor, mscale) / _magnitude(rope.factor, mscale_all_dim)
            keys[f"{prefix}.attn_factor"] = np.float32(magnitude / implied)
        if mscale_all_dim and scales_scores:
            # llama.cpp adds multiplier * ln(factor) to 1, DeepSeek's own code 0.1 * mscale_all_dim * ln(factor).
            keys[f"{prefix}.yarn_log_multiplier"] = np.float32(0.1 * mscale_all_dim)
        # Readers take mscale to be 1 for Mistral 3, and the same as mscale_all_dim for all others.
        if scales_scores and (mscale or 1.0) != (1.0 if architecture == "mistral3" else mscale_all_dim or 1.0):
            rope.settings.lose(
                f"yarn has mscale {mscale:g} and mscale_all_dim {mscale_all_dim:g}: a GGUF can only say the latter, for both"
            )
        if rope.settings.get("truncate") is False and architecture != "gpt-oss":  # there it is what readers assume
            keys[f"{prefix}.yarn_truncate"] = False
            notes.append("yarn has truncate false, which llama.cpp and ik_llama.cpp do not read: their ramp is of whole pairs")
    return keys


def _magnitude(factor: float, mscale: float) -> float:
    """The factor of cosines and sines, as YaRN has it: 1 + 0.1 mscale ln(factor)."""
    return 1.0 + 0.1 * mscale * float(np.log(factor)) if factor > 1 else 1.0


def _original_context(config: Config, rope: RopeConfig, minimum: int = 1) -> int:
    """original_max_position_embeddings of the scaling's settings, else of the config itself."""
    key = "original_max_position_embeddings"
    return (config if rope.settings.get(key) is None else rope.settings).integer(key, minimum=minimum)


def llama3_factors(config: Config, rope: RopeConfig, rotary_dim: int) -> np.ndarray:
    """Divisors of the rotary frequencies, float32 [rotary_dim / 2]: the tensor rope_freqs.weight.

    Llama 3.1's rule: wavelengths above original / low_freq_factor are multiplied by `factor`, those below original /
    high_freq_factor are unchanged, and between them the change is linear in original / wavelength. Where both factors are
    equal (Llama 4 Scout), there is nothing between them: a step. Raises FormatError for a low factor above the high one.
    """
    low, high = (
        rope.settings.number(f"{name}_freq_factor", default, positive=True) for name, default in (("low", 1.0), ("high", 4.0))
    )
    original = _original_context(config, rope)
    if low > high:
        raise config.error(f"low_freq_factor is {low}, above high_freq_factor, which is {high}")
    frequency = rope.theta ** -(np.arange(0, rotary_dim, 2) / rotary_dim)
    cycles = original * frequency / (2 * np.pi)  # of each pair over the original context: original / wavelength
    unchanged = np.clip((cycles - low) / (high - low), 0.0, 1.0) if low < high else np.where(cycles < low, 0.0, 1.0)
    return (1.0 / ((1.0 - unchanged) / rope.factor + unchanged)).astype(np.float32)


def longrope(
    architecture: str, config: Config, rope: RopeConfig, rotary_dim: int
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """LongRoPE (arXiv:2402.13753): metadata, and the frequency factors for short and long texts, tensor name -> float32 [n].

    Cosines and sines are multiplied by attention_factor, or else by sqrt(1 + ln(factor) / ln(original context)).
    """
    original = _original_context(config, rope, minimum=2)
    factor = rope.settings.number("factor", config.integer("max_position_embeddings") / original, positive=True)
    default = 1.0 if factor <= 1 else (1 + float(np.log(factor) / np.log(original))) ** 0.5
    attention_factor = rope.settings.number("attention_factor", default, positive=True)
    keys: dict[str, Any] = {
        f"{architecture}.rope.scaling.attn_factor": np.float32(attention_factor),
        f"{architecture}.rope.scaling.original_context_length": np.uint32(original),
    }
    if architecture not in ALWAYS_LONGROPE:
        keys[f"{architecture}.rope.scaling.type"] = "longrope"
    tensors = {}
    for name in ("long", "short"):
        values = rope.settings.get(f"{name}_factor")
        if not isinstance(values, list) or len(values) != rotary_dim // 2 or not all(_is_factor(v) for v in values):
            raise config.error(f"{name}_factor is {values!r:.60}; {rotary_dim // 2} numbers above 0 are needed")
        tensors[f"rope_factors_{name}.weight"] = np.array(values, np.float32)
    return keys, tensors


def _is_factor(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and FLOAT32_MIN <= value <= FLOAT32_MAX
