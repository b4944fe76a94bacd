"""What is compiled at once for types."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import encode
from ggufmill.quantize.codec_kernels import _ONE_KERNEL, _SEARCHES, codec_unit
from ggufmill.quantize.codecs.iqk.fit import fit_rows as fit_iqk
from ggufmill.quantize.codecs.iqk.iq_k_ks import _TYPES
from ggufmill.quantize.codecs.kquants.asymmetric import _encode, _encode_by_importance
from ggufmill.quantize.codecs.trellis.fit import fit_rows as fit_trellis

ENCODERS = (fit_iqk,), (fit_trellis,), (_encode, _encode_by_importance)


@pytest.mark.parametrize(
    ("codec", "other", "encoders"),
    [(*each, encoders) for each, encoders in zip(_ONE_KERNEL.items(), ENCODERS, strict=True)],
)
def test_types_of_one_encoder_are_compiled_once(codec, other, encoders):
    """Else two processes would compile the same kernel, each for another type."""
    names = [each.name for each in TYPES.values() if each.codec == codec and each.name != other]
    x = np.random.default_rng(1).standard_normal((2, 512), np.float32)
    compiled = []
    for name in names:
        for importance in (None, np.ones(512, np.float32)):
            encode(x, name, importance)
        compiled.append([len(encoder.signatures) for encoder in encoders])
    assert len(names) > 1
    assert min(compiled[0]) > 0
    assert compiled == [compiled[0]] * len(names)  # other tests may have called them with other arrays
    assert len({codec_unit(name) for name in names}) == 1
    assert codec_unit("q4_K") not in (codec_unit("q2_K"), codec_unit("q6_K"))


def test_what_rows_with_importance_need_is_compiled_apart_where_it_is_another_kernel():
    assert codec_unit("q4_K", weighted=True) != codec_unit("q4_K")
    assert codec_unit("iq4_k", weighted=True) == codec_unit("iq4_k")


def test_searches_that_are_compiled_apart_are_those_that_types_have():
    assert {each.name: each.search_part.unit for each in _TYPES if each.search_part is not None} == _SEARCHES
    assert all(codec_unit(name) == codec_unit("iq4_k") for name in _SEARCHES)
