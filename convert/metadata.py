"""GGUF metadata that architectures have in common: general.*, the hyper-parameters with a key of their own, rotary scaling.

Key names and value types are those of the gguf specification (ggml-org/ggml docs/gguf.md) and of `gguf.constants.Keys`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from .config import LARGEST, SMALLEST, Config

# metadata key, after the architecture -> key of config.json; all are needed
COMMON = {
    "block_count": "num_hidden_layers",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "vocab_size": "vocab_size",
}
DEFAULT_THETA = 10000.0
ROPE_KINDS = ("default", "linear", "yarn", "llama3", "dynamic")
LONGROPE = {"longrope": "longrope", "su": "longrope"}  # names of LongRoPE, in the families that have it


RMS_NORM = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")  # key in the GGUF, key in config.json


def common(
    architecture: str, config: Config, rope: Rope, other: Mapping[str, str] | None = None, norm: tuple[str, str] = RMS_NORM
) -> dict[str, Any]:
    """The keys that every architecture has. Raises FormatError if config.json lacks one.

    other: keys beside COMMON's, or other sources for them; norm: those of the epsilon.
    """
    sources = COMMON | dict(other or {})
    keys: dict[str, Any] = {f"{architecture}.{key}": np.uint32(config.integer(source)) for key, source in sources.items()}
    keys[f"{architecture}.{norm[0]}"] = np.float32(config.real(norm[1], positive=True))
    keys[f"{architecture}.rope.freq_base"] = np.float32(rope.theta)
    return keys


def counts(architecture: str, values: Mapping[str, int]) -> dict[str, Any]:
    return {f"{architecture}.{key}": np.uint32(value) for key, value in values.items()}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base, kind of scaling (of ROPE_KINDS; 'default' is none), the scaling's own settings, and the part of
    a head that is rotated (partial_rotary_factor; 1: all)."""

    theta: float
    kind: str
    settings: Config
    part: float = 1.0

    @property
    def factor(self) -> float:
        return self.settings.real("factor", positive=True)


def read_rope(config: Config, other: Mapping[str, str] | None = None) -> Rope:
    """From rope_theta beside rope_scaling (with `type` or `rope_type`), or from rope_parameters, which holds both.

    other: names of kinds that this family has beside ROPE_KINDS. Raises FormatError for a kind that cannot be converted.
    """
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(scaling, dict) or any(isinstance(v, dict) for v in scaling.values()):
        raise config.fail("rope_scaling or rope_parameters is not one set of settings")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    others = other or {}
    if kind not in (*ROPE_KINDS, *others):
        raise config.fail(f"rotary scaling of type {kind!r} cannot be converted; known are {', '.join((*ROPE_KINDS, *others))}")
    kind = others.get(kind, kind)
    settings = Config(config.path, scaling)
    theta = settings.real("rope_theta", config.real("rope_theta", DEFAULT_THETA, positive=True), positive=True)
    part = settings.real("partial_rotary_factor", config.real("partial_rotary_factor", 1.0, positive=True), positive=True)
    if part > 1:
        raise config.fail(f"partial_rotary_factor is {part}; at most 1 is possible")
    return Rope(theta, kind, settings, part)


def rope_scaling(architecture: str, rope: Rope, notes: list[str]) -> dict[str, Any]:
    """The rope.scaling keys; none for 'llama3', which is a tensor instead (`llama3_factors`)."""
    prefix = f"{architecture}.rope.scaling"
    if rope.kind == "dynamic":
        notes.append("the dynamic rotary scaling beyond the trained context has no counterpart in GGUF and is left out")
    if rope.kind not in ("linear", "yarn"):
        return {}
    keys: dict[str, Any] = {f"{prefix}.type": rope.kind, f"{prefix}.factor": np.float32(rope.factor)}
    if rope.kind == "yarn":
        keys[f"{prefix}.original_context_length"] = np.uint32(rope.settings.integer("original_max_position_embeddings"))
        for name, usual in (("beta_fast", 32.0), ("beta_slow", 1.0)):
            value = rope.settings.real(name, usual, positive=True)
            if value != usual:
                keys[f"{prefix}.yarn_{name}"] = np.float32(value)
        attention = rope.settings.get("attention_factor")
        if attention is not None:
            # Readers multiply their own factor, 1 + 0.1 ln(factor), by this one; the model's code has this one alone.
            own = 1.0 + 0.1 * np.log(rope.factor) if rope.factor > 1 else 1.0
            factor = rope.settings.real("attention_factor", positive=True) / own
            keys[f"{prefix}.attn_factor"] = np.float32(factor)
        mscale, everywhere = (rope.settings.real(k, 0.0) for k in ("mscale", "mscale_all_dim"))
        if everywhere:
            # GGUF readers add multiplier * ln(factor) to 1, where the model's own code has 0.1 * mscale_all_dim * ln(factor).
            keys[f"{prefix}.yarn_log_multiplier"] = np.float32(0.1 * everywhere)
        if (mscale or 1.0) != (everywhere or 1.0):
            notes.append(f"yarn has mscale {mscale} and mscale_all_dim {everywhere}; GGUF can only say the latter")
    return keys


def llama3_factors(config: Config, rope: Rope, dimensions: int) -> np.ndarray:
    """Divisors of the rotary frequencies, float32 [dimensions / 2]: the tensor rope_freqs.weight.

    Llama 3.1's rule: wavelengths beyond original / low_freq_factor are stretched by `factor`, those below original /
    high_freq_factor are kept, between them the change is smooth in original / wavelength.
    """
    low, high = (rope.settings.real(f"{k}_freq_factor", usual, positive=True) for k, usual in (("low", 1.0), ("high", 4.0)))
    key = "original_max_position_embeddings"
    original = (config if rope.settings.get(key) is None else rope.settings).integer(key)
    if low >= high:
        raise config.fail(f"low_freq_factor is {low}, not below high_freq_factor, which is {high}")
    frequency = rope.theta ** -(np.arange(0, dimensions, 2) / dimensions)
    turns = original * frequency / (2 * np.pi)  # of this pair over the original context: original / wavelength
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (1.0 / ((1.0 - kept) / rope.factor + kept)).astype(np.float32)


def longrope(architecture: str, config: Config, rope: Rope, dimensions: int) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """LongRoPE (arXiv:2402.13753): keys, and the factors of the frequencies of short and of long texts, name -> float32 [n].

    Cosines and sines are multiplied by attention_factor, or else by sqrt(1 + ln(factor) / ln(original context)).
    """
    key = "original_max_position_embeddings"
    original = (config if rope.settings.get(key) is None else rope.settings).integer(key, least=2)
    factor = rope.settings.real("factor", config.integer("max_position_embeddings") / original, positive=True)
    usual = 1.0 if factor <= 1 else (1 + float(np.log(factor) / np.log(original))) ** 0.5
    keys: dict[str, Any] = {
        f"{architecture}.rope.scaling.attn_factor": np.float32(rope.settings.real("attention_factor", usual, positive=True)),
        f"{architecture}.rope.scaling.original_context_length": np.uint32(original),
    }
    tensors = {}
    for name in ("long", "short"):
        values = rope.settings.get(f"{name}_factor")
        if not isinstance(values, list) or len(values) != dimensions // 2 or not all(_is_factor(v) for v in values):
            raise config.fail(f"{name}_factor is {values!r:.60}; {dimensions // 2} numbers above 0 are needed")
        tensors[f"rope_factors_{name}.weight"] = np.array(values, np.float32)
    return keys, tensors


def _is_factor(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and SMALLEST <= value <= LARGEST


def general(architecture: str, folder: Path, config: Config) -> dict[str, Any]:
    """The general.* keys that do not depend on how the file is going to be quantised."""
    return {
        "general.architecture": architecture,
        "general.type": "model",
        "general.name": _name(folder, config),
    }


def _name(folder: Path, config: Config) -> str:
    """The folder's name; for a snapshot in the hub's cache (models--ORG--NAME/snapshots/HASH) the repository's."""
    folder = folder.resolve()
    for part in (folder, *folder.parents):
        if part.name.startswith("models--"):
            return part.name.split("--")[-1]
    stored = config.get("_name_or_path")
    return folder.name or (Path(stored).name if isinstance(stored, str) else "") or "model"


def size_label(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """'8.0B', or '256x20B' for 256 experts with as many parameters in the rest plus one expert: llama.cpp's naming.

    shapes: tensor name -> ne shape. Parts of attn_kv_b that are there a second time (attn_k_b, attn_v_b) do not count.
    """
    twice = (".attn_k_b.", ".attn_v_b.") if any(".attn_kv_b." in name for name in shapes) else ()
    experts = _total(s for n, s in shapes.items() if "_exps." in n)
    rest = _total(s for n, s in shapes.items() if "_exps." not in n and not any(t in n for t in twice))
    count = max((s[-1] for n, s in shapes.items() if "_exps." in n), default=0)
    return f"{count}x{_rounded(rest + experts // count)}" if count else _rounded(rest)


def _total(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(prod(shape) for shape in shapes)


def _rounded(count: int) -> str:
    """Two digits at least: 17.9 B gives '18B', 8.03 B '8.0B', 2.6 M '2.6M'."""
    units = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "K"))
    unit, name = next((u for u in units if count >= 0.9995 * u[0]), units[-1])
    value = count / unit
    return f"{value:.0f}{name}" if value >= 9.95 else f"{value:.1f}{name}"
