"""Which of the ways to multiply a job of attention takes: the parts that `flash.attend` calls by their addresses."""

from __future__ import annotations

from typing import NamedTuple

from ......simd.target import target
from ..gemm.float_panels import STEP
from ..gemm.vector_products import has_bf16_dots
from .bf16_products import ROUNDED_PRODUCTS, round_to_bf16
from .byte_keys import round_byte_queries, score_bytes
from .cache_rows import BYTES, TYPE_IDS
from .row_products import ROW_PRODUCTS

# Queries of a key head from which on those of generated tokens are rounded. What is rounded is unpacked for them alone: with
# latents in f16, after 4,096 tokens, attention takes 0.95 of the time with 16 heads, 0.8 with 32, 0.6 with 128 (Zen 4).
_ROUNDED_QUERIES = 16


class Parts(NamedTuple):
    """How a job multiplies: fields of it, under their names."""

    k_type: int
    query_part: int
    score_part: int
    value_part: int


def parts_of(
    k_type: int, v_type: int, generated: bool, group: int, k_width: int, rounds: bool = False, has_shared: bool = False
) -> Parts:
    """What a job has for keys and values of these types.

    generated: of generated tokens; group, k_width: as in a job; rounds: whether, in prompts, and where many heads share a key
    head, queries, weights and rows of f16 and bf16 are rounded to bf16, and queries over keys of q8_0 to bytes, where the
    processor has dot products of these;
    has_shared: whether the job has a `shared_part`. That reads weights as float32, so these are not rounded, nor what goes with
    them; nor do its keys have splits.
    """
    rounds = rounds and not has_shared and (not generated or group >= _ROUNDED_QUERIES)
    # Without dot products of bytes, queries of 16 bits take a tenth to a fifth less.
    has_byte_dots = target().has_vnni or target().has_avx_vnni
    if k_type == BYTES or (rounds and k_type == TYPE_IDS["q8_0"] and has_byte_dots):
        return Parts(BYTES, round_byte_queries.address, score_bytes.address, 0)
    if rounds and {k_type, v_type} <= set(ROUNDED_PRODUCTS) and has_bf16_dots() and not k_width % STEP:
        score, add = ROUNDED_PRODUCTS[k_type].score, ROUNDED_PRODUCTS[v_type].add
        return Parts(k_type, round_to_bf16.address, score.address, add.address)
    # What adding lanes up takes grows with the queries, what decoding takes with the width: measured on a Zen 4, they meet
    # near 14 queries of 64 numbers, 16 of 96 and 28 of 128. The queries of one token count, so that drafts get the sums of
    # single ones.
    is_small, is_split = 9 * group <= 2 * k_width, generated and not has_shared
    if not (is_split and is_small and k_type == v_type and k_type in ROW_PRODUCTS):
        return Parts(k_type, 0, 0, 0)
    products = ROW_PRODUCTS[k_type]
    return Parts(k_type, 0, products.score.address, products.add.address)
