import math

import numpy as np
import pytest

from ggufmill.formats import FormatError, PlanError, SourceTensor, TensorSource
from ggufmill.runtime.graph import GraphBuilder
from ggufmill.runtime.hparams import HParams
from ggufmill.runtime.models.rotary import frequency_factors, rotary_embedding, rotated_dims, yarn_mscale


def hparams(**values):
    names = {key.replace("__", "."): value for key, value in values.items()}
    return HParams({"general.architecture": "x"} | {f"x.{key}": value for key, value in names.items()}, "test")


def frequencies(dims, factors=None, **values):
    return rotary_embedding(hparams(**values), dims, True, factors).frequencies


def test_plain_frequencies():
    assert frequencies(4, rope__freq_base=100.0).tolist() == pytest.approx([1.0, 0.1])
    assert rotary_embedding(hparams(), 64, True).dims == 64


def test_factors_and_linear_scaling_divide_frequencies():
    plain = frequencies(8)
    assert np.allclose(frequencies(8, rope__scaling__type="linear", rope__scaling__factor=4.0), plain / 4)
    assert np.allclose(frequencies(8, rope__scale_linear=2.0), plain / 2)  # as older files say it
    factors = np.array([1, 2, 4, 8], np.float32)
    assert np.allclose(frequencies(8, factors), plain / factors)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    values = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 40.0,
        "rope__scaling__original_context_length": 4096,
        "context_length": 163840,
    }
    with_temperature = rotary_embedding(hparams(**values), 64, True)
    # DeepSeek-V3's numbers: the ramp runs from pair 10 to pair 23
    ratio = with_temperature.frequencies / frequencies(64)
    assert np.all(ratio[:11] == 1)
    assert np.allclose(ratio[23:], 1 / 40)
    assert np.all(np.diff(ratio[10:24]) < 0)
    assert with_temperature.magnitude == pytest.approx(1 + 0.1 * math.log(40))
    on_scores = rotary_embedding(hparams(**values, rope__scaling__yarn_log_multiplier=0.1), 64, True)
    assert on_scores.magnitude == 1
    assert yarn_mscale(40, 0.1) == pytest.approx(1.3688879)
    assert yarn_mscale(1, 0.1) == 1


def test_yarns_ramp_begins_at_a_whole_pair_unless_the_file_says_otherwise():
    """gpt-oss's numbers."""
    values = {"rope__scaling__type": "yarn", "rope__scaling__factor": 32.0, "rope__scaling__original_context_length": 64}
    values |= {"context_length": 2048, "rope__freq_base": 150000.0}
    # The paper's rule, with 32 turns below pair 0: the ramp rises from there to where a pair turns once in 64 tokens.
    high = 64 * np.log(64 / (2 * np.pi)) / (2 * np.log(150000.0))
    plain = 150000.0 ** (-np.arange(32) / 32)
    for end, options in ((high, {"rope__scaling__yarn_truncate": False}), (np.ceil(high), {})):
        ramp = np.clip(np.arange(32) / end, 0, 1)
        assert np.allclose(frequencies(64, **values, **options), plain * (1 - ramp) + plain / 32 * ramp, rtol=1e-12)


def test_unknown_scaling_is_refused():
    with pytest.raises(PlanError, match="scaling of type 'dynamic' is not supported"):
        rotary_embedding(hparams(rope__scaling__type="dynamic"), 8, True)


def test_rotated_elements_come_in_pairs_and_fit_into_a_head():
    assert rotated_dims(hparams(), 12) == 12
    assert rotated_dims(hparams(rope__dimension_count=8), 12) == 8
    with pytest.raises(FormatError, match="7 elements of a head cannot be rotated in pairs"):
        rotated_dims(hparams(rope__dimension_count=7), 12)
    with pytest.raises(FormatError, match="dimension_count is 14, not 0 to 12"):
        rotated_dims(hparams(rope__dimension_count=14), 12)


def test_which_set_of_factors_is_used():
    def graph(**tensors):
        made = {
            f"{name}.weight": SourceTensor(f"{name}.weight", (4,), "f32", lambda a, b, v=v: np.full((1, 4), v, np.float32))
            for name, v in tensors.items()
        }
        return GraphBuilder(TensorSource("test", {}, made, ""))

    keys = hparams(context_length=128, rope__scaling__original_context_length=64)
    assert frequency_factors(graph(), keys, 8, None) is None
    assert frequency_factors(graph(rope_freqs=5.0), keys, 8, None).tolist() == [5.0] * 4
    both = graph(rope_factors_long=2.0, rope_factors_short=1.0)
    assert [frequency_factors(both, keys, 8, n)[0] for n in (None, 65, 64)] == [2.0, 2.0, 1.0]
    with pytest.raises(FormatError, match=r"rope_freqs\.weight has shape \(4,\), expected is \(3,\)"):
        frequency_factors(graph(rope_freqs=1.0), keys, 6, None)
