"""Rotary position embedding: pairs of elements are rotated by an angle proportional to the position.

Plain (RoFormer, arXiv:2104.09864), linear scaling, YaRN (arXiv:2309.00071) and per-frequency factors (Llama 3's, stored as a
tensor). Where YaRN scales the cosines and sines too, that is `magnitude`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from ....formats import FormatError, PlanError
from ....simd.workers import Workers
from ...hparams import HParams
from .kernels.elementwise import RUN, rotate, rotate_part
from .weights import WeightStore


@dataclass(frozen=True, eq=False)
class Rope:
    """How the first `2 * len(frequencies)` elements of a head are rotated.

    frequencies  float64 [pairs], radians per position
    magnitude    factor of the rotated pairs
    interleaved  pairs are (0, 1), (2, 3), ... (ggml's NORM); else (0, d/2), (1, d/2 + 1), ... (NEOX)
    """

    frequencies: np.ndarray
    magnitude: float
    interleaved: bool

    @classmethod
    def plain(cls, base: float, dims: int, interleaved: bool) -> Rope:
        """Pair i turns by base ** (-2 i / dims) per position."""
        return cls(base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims), 1.0, interleaved)

    @property
    def dims(self) -> int:
        return 2 * len(self.frequencies)

    def table(self, positions: np.ndarray) -> np.ndarray:
        """int [n] -> complex64 [n, pairs], what `rotate` needs for tokens at these positions."""
        angles = positions[:, None] * self.frequencies
        out = np.empty(angles.shape, np.complex64)
        out.real, out.imag = self.magnitude * np.cos(angles), self.magnitude * np.sin(angles)
        return out

    def rotate(self, x: np.ndarray, table: np.ndarray, workers: Workers | None = None) -> None:
        """Rotates x float32 [n, heads, size >= dims] in place; the last axis has to be contiguous. workers: who may help."""
        team = workers.ready() if workers is not None and x.size > RUN else 0
        rotate(team, rotate_part.address, x, table, self.interleaved)


def frequency_factors(store: WeightStore, hparams: HParams, dims: int, n_ctx: int | None) -> np.ndarray | None:
    """What the frequencies of `dims` rotated elements are divided by, float32 [dims / 2], if a tensor says so.

    Of two sets (LongRoPE, arXiv:2402.13753) the one for texts beyond the original context is used when so many tokens may
    come: n_ctx, or else all that the model can take.
    """
    name = "rope_freqs.weight"
    if "rope_factors_long.weight" in store:
        is_long = (n_ctx or hparams.int("context_length")) > hparams.int("rope.scaling.original_context_length", 0)
        name = f"rope_factors_{'long' if is_long else 'short'}.weight"
    return store.vector(name, dims // 2) if name in store else None


def yarn_mscale(factor: float, multiplier: float) -> float:
    """1 + multiplier * ln(factor), YaRN's attention temperature; DeepSeek's multiplier is 0.1 * mscale_all_dim."""
    return 1.0 + multiplier * math.log(factor) if factor > 1 else 1.0


def rotated_dims(hparams: HParams, width: int) -> int:
    """How many elements of heads of that width are rotated. Raises FormatError for an odd number or one beyond the width."""
    dims = hparams.size("rope.dimension_count", width, 0, width)
    if dims % 2:
        raise FormatError(f"{hparams.path}: {dims} elements of a head cannot be rotated in pairs")
    return dims


def rope_from(hparams: HParams, dims: int, interleaved: bool, factors: np.ndarray | None = None) -> Rope:
    """The rotation that a model's `rope.*` metadata describes.

    dims: rotated elements per head; factors: float32 [dims / 2] of the tensor rope_freqs.weight, which divide the frequencies.
    YaRN's ramp begins and ends at a whole pair, unless the metadata says otherwise (rope.scaling.yarn_truncate is false).
    Raises PlanError for a kind of scaling that is not known.
    """
    base = hparams.positive("rope.freq_base", 10000.0)
    frequencies = Rope.plain(base, dims, interleaved).frequencies
    if factors is not None:
        frequencies = frequencies / factors
    kind = hparams.text("rope.scaling.type", "linear" if "rope.scale_linear" in hparams else "none")
    if kind == "none":
        return Rope(frequencies, hparams.float("rope.scaling.attn_factor", 1.0), interleaved)
    if kind == "linear":
        factor = hparams.float("rope.scaling.factor", hparams.float("rope.scale_linear", 1.0))
        return Rope(frequencies / (factor or 1.0), 1.0, interleaved)
    if kind == "yarn":
        return _yarn(hparams, frequencies, base, interleaved)
    raise PlanError(f"{hparams.path}: rope scaling of kind {kind!r} is not supported (none, linear and yarn are)")


def _yarn(hparams: HParams, frequencies: np.ndarray, base: float, interleaved: bool) -> Rope:
    """Low frequencies are divided by the factor, high ones are kept, with a ramp in between (paper, section 3.2)."""
    factor = hparams.positive("rope.scaling.factor")
    trained = hparams.size("rope.scaling.original_context_length", hparams.int("context_length"))
    if base == 1:
        raise FormatError(f"{hparams.path}: metadata key {hparams.architecture}.rope.freq_base is 1: nothing would turn")
    dims = 2 * len(frequencies)

    def pair_of(rotations: float) -> float:
        """The pair (a real number) that turns so many times within the trained context."""
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = (pair_of(hparams.positive(f"rope.scaling.yarn_beta_{k}", v)) for k, v in (("fast", 32.0), ("slow", 1.0)))
    if hparams.flag("rope.scaling.yarn_truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)
    # With a log multiplier the temperature acts on the scores instead (DeepSeek: mscale = mscale_all_dim, which cancel here).
    magnitude = 1.0 if "rope.scaling.yarn_log_multiplier" in hparams else yarn_mscale(factor, 0.1)
    return Rope(blended, magnitude * hparams.float("rope.scaling.attn_factor", 1.0), interleaved)
