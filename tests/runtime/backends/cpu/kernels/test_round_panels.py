"""Products with panels that are rounded to one scale per 256 columns, against numpy."""

import numpy as np
import pytest
from cpu_products import quantise
from packed_samples import sample_of, store_of

from ggufmill.formats import TYPES
from ggufmill.formats.layouts import decode
from ggufmill.quantize import can_encode, encode
from ggufmill.runtime.backends.cpu.kernels.gemm.round_panels import MOST_BITS, ROUNDED, SPANS, rounded_span
from ggufmill.runtime.backends.cpu.kernels.gemm.unpack_panels import panel_form, unpack
from ggufmill.simd.instructions import amx
from ggufmill.simd.instructions.dot_products import pairs_that_fit
from ggufmill.simd.target import target

KNOWN = [name for name, kind in TYPES.items() if can_encode(kind) and panel_form(name) is not None]
ROUNDING = [name for name in KNOWN if rounded_span(TYPES[name], panel_form(name))]
# Codes to 15 with and without terms, of signed tables, grids with signs, trellises, groups of 16 and 32, interleaved rows.
OF_EACH_KIND = ["q4_0", "q4_K", "q2_K", "iq4_k", "iq2_k", "iq4_ks", "iq2_xxs", "iq3_s", "iq1_s", "iq2_kt", "mxfp4", "iq4_k_r4"]
OF_EACH_KIND += ["q6_0", "q5_K", "iq6_k", "q6_K"]  # activations with a scale per 32


@pytest.fixture(autouse=True)
def bytes_only(monkeypatch):
    monkeypatch.setattr(amx, "permitted", lambda: False)


def multiply(name, q, x, rows, **settings):
    return store_of(name, q, rows, x.shape[1], **settings).matrix("w").multiply(x, use_gemv=False)


def steps_of(name, q, rows, columns):
    """float64 [rows, columns]: what one step of a rounded weight is, by the largest that its 256 could be."""
    panels, form = unpack(q, name, columns), panel_form(name)

    def wide(numbers):
        return np.repeat(numbers.transpose(0, 2, 1).reshape(-1, columns // panels.group), panels.group, axis=1)[:rows]

    scales = wide(panels.scales).astype(np.float64)
    terms = 0 if panels.terms is None else wide(panels.terms).astype(np.float64)
    largest = np.maximum(*(abs(terms + (code - panels.zero) * scales) for code in (form.least, form.most)))
    largest = largest.reshape(rows, -1, ROUNDED.group).max(axis=2)
    return np.repeat(largest / 127, ROUNDED.group, axis=1)


@pytest.mark.slow(keep=OF_EACH_KIND)
@pytest.mark.parametrize("name", ROUNDING)
def test_rounded_weights_are_off_by_half_a_step(name):
    """The rows of the unit matrix are exact as codes, and their products the rounded weights."""
    rows, columns = 48 if TYPES[name].rows > 1 else 43, 768
    weights, q = sample_of(name, rows, columns)
    if name == "iq6_k":  # decodes with a cubic, whose integers products have
        weights = decode(q, name, columns, integer_values=True)
    rounded = multiply(name, q, np.eye(columns, dtype=np.float32), rows, fast=True).T.astype(np.float64)
    steps = steps_of(name, q, rows, columns)
    assert (abs(rounded - weights) <= (0.5 + 4 / 64) * steps).all()
    assert abs(rounded - weights).max() > 0.4 * steps.min()  # they were rounded
    codes = rounded / steps
    assert abs(codes - np.rint(codes)).max() < 1e-3
    assert abs(codes).max() < 127.5

    x = np.random.default_rng(3).standard_normal((64, columns)).astype(np.float32)
    span = rounded_span(TYPES[name], panel_form(name))
    taken = quantise(x, span)
    taken = taken.codes * np.repeat(taken.scales.astype(np.float64), span, axis=1)
    found = multiply(name, q, x, rows, fast=True)
    assert abs(found - taken @ rounded.T).max() <= 1e-5 * abs(found).max()
    assert np.array_equal(multiply(name, q, x, rows, fast=True, threads=3), found)
    for first in (30, 63):
        assert np.array_equal(multiply(name, q, x[first:], rows, fast=True), found[first:])


@pytest.mark.slow(keep=["q8_0"])
@pytest.mark.parametrize("name", [name for name in KNOWN if name not in ROUNDING])
def test_other_types_are_multiplied_as_they_are(name):
    rows = 48 if TYPES[name].rows > 1 else 43
    _, q = sample_of(name, rows, 512)
    x = np.random.default_rng(3).standard_normal((64, 512)).astype(np.float32)
    assert np.array_equal(multiply(name, q, x, rows, fast=True), multiply(name, q, x, rows))


def test_rows_of_other_lengths_are_multiplied_as_they_are():
    _, q = sample_of("iq4_nl", 43, 544)
    x = np.random.default_rng(3).standard_normal((9, 544)).astype(np.float32)
    assert np.array_equal(multiply("iq4_nl", q, x, 43, fast=True), multiply("iq4_nl", q, x, 43))


def test_types_that_are_rounded():
    """All of few bits, where the processor has one instruction for products of any bytes; else those with large codes."""
    few_bits = [name for name in KNOWN if 8 * TYPES[name].block_bytes / TYPES[name].block <= MOST_BITS]
    assert {name: rounded_span(TYPES[name], panel_form(name)) for name in ("iq4_k", "iq5_ks", "iq6_k", "q8_0", "q8_KV")} == {
        **{"iq4_k": target().choose(SPANS), "iq5_ks": 32, "iq6_k": 32, "q8_0": None, "q8_KV": None},
    }
    if pairs_that_fit(15) is None:
        assert few_bits == ROUNDING
    else:
        assert "q4_K" not in ROUNDING


def test_zeros_stay_and_what_is_not_finite_spoils():
    rows = np.zeros((32, 512), np.float32)
    rows[1, :256] = 1.0
    q = encode(rows, "q4_K").copy()
    q[2, :2] = np.array([np.nan], np.float16).view(np.uint8)
    found = multiply("q4_K", q, np.ones((9, 512), np.float32), 32, fast=True)
    assert np.isnan(found[:, 2]).all()
    assert (found[:, 0] == 0).all()
    assert (found[:, 3:] == 0).all()
    assert abs(found[:, 1] - 256).max() < 2
