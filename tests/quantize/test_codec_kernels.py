"""What is compiled at once for types."""

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.quantize import encode
from ggufmill.quantize.codec_kernels import _ONE_KERNEL, codec_unit
from ggufmill.quantize.codecs.iqk.fit import fit_rows as fit_iqk
from ggufmill.quantize.codecs.trellis.fit import fit_rows as fit_trellis


@pytest.mark.parametrize(("codec", "encoder"), zip(_ONE_KERNEL, (fit_iqk, fit_trellis), strict=True))
def test_types_of_one_encoder_are_compiled_once(codec, encoder):
    """Else two processes would compile the same kernel, each for another type."""
    names = [each.name for each in TYPES.values() if each.codec == codec]
    x = np.random.default_rng(1).standard_normal((2, 512), np.float32)
    for name in names:
        for importance in (None, np.ones(512, np.float32)):
            encode(x, name, importance)
    assert len(names) > 3
    assert len(encoder.signatures) == 1
    assert len({codec_unit(name) for name in names}) == 1
    assert codec_unit("q4_K") != codec_unit("q5_K")
