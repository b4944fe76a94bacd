"""Codebook and trellis types under a covariance: taken apart as decoders do, descent as in plain numpy, never worse per row."""

from __future__ import annotations

import numpy as np
import pytest
from covariances import covariance, random_rows, row_errors, weights

from ggufmill.formats import TYPES
from ggufmill.quantize import decode, encode
from ggufmill.quantize.codecs.fields import BlockFields
from ggufmill.quantize.covariance.matrix.prepared import prepare
from ggufmill.quantize.covariance.refine import refine
from ggufmill.quantize.covariance.vector_refinement import VectorRefinement
from ggufmill.quantize.covariance.vectors import VectorRows, is_vector, vector_table

VECTOR_TYPES = [TYPES[name].name for name in TYPES if is_vector(name)]


def test_vector_types():
    assert set(VECTOR_TYPES) == {
        *("iq1_s", "iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s", "iq2_kl"),
        *("iq1_kt", "iq2_kt", "iq3_kt", "iq4_kt", "iq1_s_r4", "iq1_m_r4"),
    }


@pytest.mark.parametrize("type_name", VECTOR_TYPES)
def test_rows_taken_apart_and_put_together(type_name):
    q = random_rows(type_name, 8, 512)
    rows, empty = VectorRows.of(q, type_name), q.copy()
    assert np.array_equal(rows.values(), decode(q, type_name, 512))
    fields = BlockFields.of(type_name)
    for name in fields.layout.bit_arrays():
        fields.write(empty, name, np.zeros_like(fields.read(q, name)))
    assert not np.array_equal(empty, q)
    rows.write(empty)
    if rows.table.books > 1 and rows.fields.layout.flags is None:  # the book's bit is the same in all codes of a block
        assert np.array_equal(decode(empty, type_name, 512), rows.values())
    else:
        assert np.array_equal(empty, q)


@pytest.mark.slow(keep=["iq2_xxs", "iq1_s"])
@pytest.mark.parametrize("type_name", VECTOR_TYPES)
def test_random_codes_become_good_ones(type_name):
    x, h = weights(12, 512), covariance(512, 40)
    q = random_rows(type_name, 12, 512)
    before, errors = row_errors(x, q, type_name, h), []
    for effort in (0, 1, 2):
        refined = refine(x, q, type_name, prepare(h), effort)
        errors.append(row_errors(x, refined, type_name, h))
        assert (errors[-1] <= before * (1 + 1e-5)).all()
    assert errors[2].sum() < errors[1].sum() < errors[0].sum() < 0.8 * before.sum()


@pytest.mark.slow(keep=["iq2_*", "iq1_*"])
@pytest.mark.parametrize("type_name", ["iq3_s", "iq2_xxs", "iq1_m", "iq2_kl", "iq2_kt", "iq1_s_r4", "iq1_m_r4"])
def test_better_than_the_encoder_alone(type_name):
    x, h = weights(8, 512), covariance(512, 40)
    before = row_errors(x, encode(x, type_name, h.diagonal), type_name, h)
    after = row_errors(x, encode(x, type_name, covariance=h), type_name, h)
    assert (after <= before * (1 + 1e-5)).all()
    assert after.sum() < 0.8 * before.sum()


@pytest.mark.parametrize("magnitude", [1e-30, 1e-6, 1e4])
@pytest.mark.slow(keep=["*iq1_*"])
@pytest.mark.parametrize("type_name", ["iq3_xxs", "iq1_s", "iq4_kt", "iq1_m_r4"])
def test_no_row_is_worse_whatever_its_size(type_name, magnitude):
    rng = np.random.default_rng(5)
    x = weights(4, 512) * np.exp(3 * rng.standard_normal((4, 512))).astype(np.float32) * np.float32(magnitude)
    x[:, rng.random(512) < 0.1] = 0
    x[3] = 0
    h = covariance(512, 3, dead=64)
    before = row_errors(x, encode(x, type_name, h.diagonal, report=False), type_name, h)
    after = row_errors(x, encode(x, type_name, covariance=h, report=False), type_name, h)
    assert (after <= before * (1 + 1e-5)).all()


def sweep_in_numpy(x: np.ndarray, rows: VectorRows, values: np.ndarray, h: np.ndarray) -> np.ndarray:
    """One sweep over one row: of all entries with the signs of the unconstrained optimum the best one."""
    size, table, values = rows.table.size, rows.table, values.astype(np.float64)
    points = (
        table.lanes.reshape(table.books, -1, size, 16).transpose(0, 1, 3, 2).reshape(table.books, -1, size).astype(np.float64)
    )
    for v in range(len(x) // size):
        s, factor = slice(v * size, (v + 1) * size), float(rows.parameters()[0][0, v])
        if factor == 0:
            continue
        block, old = h[s, s], values[s]
        linear = (x - values) @ h[:, s] + old @ block
        optimum = np.linalg.solve(block, linear)
        books = points if table.flagged else points[[rows.entries[0, v] // table.entries]]
        candidates = books.reshape(-1, size) * factor
        if table.signs:
            signs = np.where(optimum < 0, -1, 1)
            if table.signs == 2 and np.prod(signs) != np.prod(np.sign(rows.weight_signs[0, s])):
                signs[np.argmin(optimum**2 * np.diagonal(block))] *= -1
            candidates = candidates * signs

        def error(p: np.ndarray, block: np.ndarray = block, linear: np.ndarray = linear) -> np.ndarray:
            return np.einsum("...i,ij,...j->...", p, block, p) - 2 * p @ linear

        errors = error(candidates)
        if errors.min() < error(old):
            values[s] = candidates[np.argmin(errors)]
    return values


@pytest.mark.slow(keep=["iq2_*", "iq1_*"])
@pytest.mark.parametrize("type_name", ["iq3_s", "iq3_xxs", "iq2_xxs", "iq1_m", "iq1_s", "iq2_kl"])
def test_sweep_is_that_of_plain_numpy(type_name):
    x, h, q = weights(1, 512), covariance(512, 40), random_rows(type_name, 1, 512)
    rows = VectorRows.of(q, type_name)
    expected = sweep_in_numpy(x[0].astype(np.float64), rows, decode(q, type_name, 512)[0], h.damped().astype(np.float64))
    refined = decode(refine(x, q, type_name, prepare(h), 0), type_name, 512)[0]
    assert np.mean(np.abs(refined - expected) > 1e-6) < 0.02  # but for ties and roundings of float32


@pytest.mark.parametrize("type_name", ["iq2_xs", "iq3_kt"])
def test_rows_do_not_depend_on_each_other(type_name):
    x, h, q = weights(9, 512), prepare(covariance(512, 30)), random_rows(type_name, 9, 512)
    together = refine(x, q, type_name, h, 1)
    apart = np.concatenate([refine(x[i : i + 4], q[i : i + 4], type_name, h, 1) for i in range(0, 9, 4)])
    assert np.array_equal(together, apart)


def test_sweep_ends_with_the_row():
    """Rows of 96 columns fill one panel of 64 and half of another, whose second half is not theirs."""
    x, h, q = weights(4, 96), covariance(96, 40), random_rows("iq1_s_r4", 4, 96)
    refinement = VectorRefinement(x, VectorRows.of(q, "iq1_s_r4"), prepare(h).damped, 0)
    refinement.gradient.reshape(4, -1)[:, 96:] = 1
    others = refinement.rows.entries[1:].copy()
    refinement._finite[1:] = False
    refinement.choose_codes()
    assert np.array_equal(refinement.rows.entries[1:], others)


def test_tables_hold_all_entries():
    table = vector_table("iq4_kt")
    assert (table.books, table.entries, table.size) == (2, 1 << 15, 4)
    assert np.array_equal(np.sort(table.codes), np.arange(1 << 16))
