"""Fields of blocks: reading and writing them back gives the same bytes, and their values are those of the decoders."""

from __future__ import annotations

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.formats.layouts import layout_of
from ggufmill.quantize import decode
from ggufmill.quantize.codecs.fields import BlockFields
from ggufmill.quantize.covariance.values import ScalarRows, is_scalar, value_table

# All but those whose rows begin with the sum of their codes, too.
CODED_TYPES = [name for name in TYPES if TYPES[name].codec and layout_of(name).number is None and "q8_KV" not in name]
SCALAR_TYPES = [TYPES[name].name for name in TYPES if is_scalar(name)]


def random_rows(type_name: str, rows: int, n: int) -> np.ndarray:
    return np.random.default_rng(len(type_name)).integers(0, 256, (rows, TYPES[type_name].row_bytes(n)), np.uint8)


@pytest.mark.parametrize("type_name", CODED_TYPES)
def test_written_back(type_name):
    q, fields = random_rows(type_name, 8, 512), BlockFields.of(type_name)
    out = np.zeros_like(q)
    for name in fields.layout.bit_arrays():
        fields.write(out, name, fields.read(q, name))
    rows = fields.type.rows
    meta, group = rows * fields.type.row_meta, (8 // rows, -1)
    assert np.array_equal(out.reshape(group)[:, meta:], q.reshape(group)[:, meta:])
    if fields.layout.d is None and fields.layout.row_scale is None:
        return
    with np.errstate(all="ignore"):
        d = fields.read_scale(q)
    fields.write_scale(out, d)
    finite = np.isfinite(d).reshape(group).all(axis=1)
    assert np.array_equal(out.reshape(group)[finite], q.reshape(group)[finite])


@pytest.mark.parametrize("type_name", SCALAR_TYPES)
def test_values_are_those_of_the_decoder(type_name):
    q = random_rows(type_name, 7, 512)
    rows = ScalarRows.of(q, type_name)
    stored = np.isin(rows.codes, value_table(type_name).codes)  # all but -128 and the second zero of mxfp4
    decoded = decode(q, type_name, 512)
    usable = stored & np.isfinite(decoded)
    assert usable.mean() > 0.5
    assert np.array_equal(rows.values()[usable], decoded[usable])
    out = np.zeros_like(q)
    rows.write(out)
    finite = np.isfinite(rows.d).all(axis=1) & (rows.dmin is None or np.isfinite(rows.dmin).all(axis=1))
    assert finite.any()
    assert np.array_equal(out[finite], q[finite])


def test_scalar_types():
    assert {"q4_0", "q5_1", "q2_K", "q6_K", "iq4_nl", "iq4_xs", "iq2_ks", "iq3_k", "iq5_ks", "mxfp4"} <= set(SCALAR_TYPES)
    assert not {"f16", "iq2_xxs", "iq1_s", "iq2_kt", "q8_KV", "iq2_bn", "iq2_kl"} & set(SCALAR_TYPES)
