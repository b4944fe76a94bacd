"""Rotary position embeddings as a model's `rope.*` metadata and tensors describe them.

Plain (RoFormer, arXiv:2104.09864), with linear scaling, with YaRN (arXiv:2309.00071), and with a factor per frequency, which a
tensor has (Llama 3's, or LongRoPE's two sets, arXiv:2402.13753).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from ...formats import FormatError, PlanError
from ..graph.values import RotaryEmbedding
from ..hparams import HParams

if TYPE_CHECKING:
    from ..graph import GraphBuilder


def rotated_dims(hparams: HParams, width: int) -> int:
    """How many elements of heads of that width are rotated. Raises FormatError for an odd number or one beyond the width."""
    dims = hparams.size("rope.dimension_count", width, 0, width)
    if dims % 2:
        raise FormatError(f"{hparams.path}: {dims} elements of a head cannot be rotated in pairs")
    return dims


def plain_frequencies(base: float, dims: int) -> np.ndarray:
    """float64 [dims / 2]: pair i rotates by base ** (-2 i / dims) radians per position."""
    return base ** (-np.arange(0, dims, 2, dtype=np.float64) / dims)


def frequency_factors(
    graph: GraphBuilder, hparams: HParams, dims: int, n_ctx: int | None, stored: int | None = None
) -> np.ndarray | None:
    """What the frequencies of `dims` rotated elements are divided by, float32 [dims / 2]; None where no tensor says so.

    stored: how many elements the tensor is for, of which the first `dims` are rotated; None: `dims`.

    Of LongRoPE's two sets the one for long texts is used when more tokens than the original context may come: n_ctx, or else
    the context length that the model was trained for.
    """
    name = "rope_freqs.weight"
    if "rope_factors_long.weight" in graph:
        is_long = (n_ctx or hparams.int("context_length")) > hparams.int("rope.scaling.original_context_length", 0)
        name = f"rope_factors_{'long' if is_long else 'short'}.weight"
    return graph.vector(name, (stored or dims) // 2)[: dims // 2] if name in graph else None


def yarn_mscale(factor: float, multiplier: float) -> float:
    """1 + multiplier * ln(factor), YaRN's attention temperature; DeepSeek's multiplier is 0.1 * mscale_all_dim."""
    return 1.0 + multiplier * math.log(factor) if factor > 1 else 1.0


def rotary_embedding(hparams: HParams, dims: int, interleaved: bool, factors: np.ndarray | None = None) -> RotaryEmbedding:
    """The rotation of `dims` elements of a head; factors: float32 [dims / 2], which divide the frequencies.

    Raises PlanError for a type of scaling that is not known.
    """
    base = hparams.positive("rope.freq_base", 10000.0)
    frequencies = plain_frequencies(base, dims)
    if factors is not None:
        frequencies = frequencies / factors
    scaling = hparams.text("rope.scaling.type", "linear" if "rope.scale_linear" in hparams else "none")
    if scaling in ("none", "longrope"):  # whose factors are tensors
        return RotaryEmbedding(frequencies, hparams.float("rope.scaling.attn_factor", 1.0), interleaved)
    if scaling == "linear":
        factor = hparams.float("rope.scaling.factor", hparams.float("rope.scale_linear", 1.0))
        return RotaryEmbedding(frequencies / (factor or 1.0), 1.0, interleaved)
    if scaling == "yarn":
        return _yarn(hparams, frequencies, base, interleaved)
    raise PlanError(f"{hparams.path}: rope scaling of type {scaling!r} is not supported (none, linear, yarn and longrope are)")


def _yarn(hparams: HParams, frequencies: np.ndarray, base: float, interleaved: bool) -> RotaryEmbedding:
    """Low frequencies are divided by the factor, high ones stay, with a linear ramp in between (YaRN, section 3.2).

    The ramp begins and ends at whole pairs, unless rope.scaling.yarn_truncate is false.
    """
    factor = hparams.positive("rope.scaling.factor")
    trained = hparams.size("rope.scaling.original_context_length", hparams.int("context_length"))
    if base == 1:
        raise FormatError(f"{hparams.path}: metadata key {hparams.architecture}.rope.freq_base is 1: nothing would rotate")
    dims = 2 * len(frequencies)

    def pair_of(rotations: float) -> float:
        """The pair (a real number) that makes this number of rotations within the trained context."""
        return dims * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = pair_of(hparams.positive("rope.scaling.yarn_beta_fast", 32.0))
    high = pair_of(hparams.positive("rope.scaling.yarn_beta_slow", 1.0))
    if hparams.flag("rope.scaling.yarn_truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dims - 1)
    ramp = np.clip((np.arange(len(frequencies)) - low) / max(high - low, 0.001), 0, 1)
    blended = frequencies / factor * ramp + frequencies * (1 - ramp)
    magnitude = yarn_mscale(factor, 0.1)
    if "rope.scaling.yarn_log_multiplier" in hparams:
        # DeepSeek scales the scores instead (mscale and mscale_all_dim, a tenth of which is in this key, cancel); in Mistral 3
        # it is mscale_all_dim itself, which magnitudes are divided by.
        is_divisor = hparams.architecture == "mistral3"
        multiplier = 0.1 * hparams.float("rope.scaling.yarn_log_multiplier") if is_divisor else 0.1
        magnitude /= yarn_mscale(factor, multiplier)
    return RotaryEmbedding(blended, magnitude * hparams.float("rope.scaling.attn_factor", 1.0), interleaved)
