import math

import numpy as np
import pytest

from ggufmill.formats import PlanError
from ggufmill.runtime.backends.cpu.rope import Rope, rope_from, yarn_mscale
from ggufmill.runtime.hparams import HParams


def hparams(**values):
    names = {key.replace("__", "."): value for key, value in values.items()}
    return HParams({"general.architecture": "x"} | {f"x.{key}": value for key, value in names.items()}, "test")


def test_pairs_turn_by_position_times_frequency():
    rope = rope_from(hparams(rope__freq_base=100.0), 4, interleaved=True)
    assert rope.frequencies.tolist() == pytest.approx([1.0, 0.1])
    x = np.array([[[1, 0, 0, 2, 9]]], np.float32)
    rope.rotate(x, rope.table(np.array([3])))
    assert x[0, 0].tolist() == pytest.approx([math.cos(3), math.sin(3), -2 * math.sin(0.3), 2 * math.cos(0.3), 9])


def test_the_two_pairings_are_permutations_of_each_other():
    random = np.random.default_rng(0)
    x = random.standard_normal((5, 2, 8)).astype(np.float32)
    frequencies = random.random(4)
    table = Rope(frequencies, 1.0, True).table(np.arange(5))
    interleaved, halves = x.copy(), np.concatenate([x[..., 0::2], x[..., 1::2]], axis=-1)
    Rope(frequencies, 1.0, True).rotate(interleaved, table)
    Rope(frequencies, 1.0, False).rotate(halves, table)
    assert np.allclose(np.concatenate([interleaved[..., 0::2], interleaved[..., 1::2]], axis=-1), halves, atol=1e-6)


def test_scores_depend_on_distance_only():
    rope = rope_from(hparams(), 16, interleaved=True)
    q, k = np.random.default_rng(1).standard_normal((2, 1, 1, 16)).astype(np.float32)

    def score(at_q, at_k):
        a, b = q.copy(), k.copy()
        rope.rotate(a, rope.table(np.array([at_q])))
        rope.rotate(b, rope.table(np.array([at_k])))
        return float((a * b).sum())

    assert score(7, 3) == pytest.approx(score(104, 100), abs=1e-4)
    assert abs(score(7, 3) - score(8, 3)) > 1e-3


def test_factors_and_linear_scaling_divide_frequencies():
    plain = rope_from(hparams(), 8, True).frequencies
    linear = rope_from(hparams(rope__scaling__type="linear", rope__scaling__factor=4.0), 8, True).frequencies
    assert np.allclose(linear, plain / 4)
    old = rope_from(hparams(rope__scale_linear=2.0), 8, True).frequencies
    assert np.allclose(old, plain / 2)
    factors = np.array([1, 2, 4, 8], np.float32)
    assert np.allclose(rope_from(hparams(), 8, True, factors).frequencies, plain / factors)


def test_yarn_keeps_fast_pairs_and_stretches_slow_ones():
    values = {
        "rope__scaling__type": "yarn",
        "rope__scaling__factor": 40.0,
        "rope__scaling__original_context_length": 4096,
        "context_length": 163840,
    }
    plain = rope_from(hparams(), 64, True).frequencies
    with_temperature = rope_from(hparams(**values), 64, True)
    # DeepSeek-V3's numbers: the ramp runs from pair 10 to pair 23
    ratio = with_temperature.frequencies / plain
    assert np.all(ratio[:11] == 1)
    assert np.allclose(ratio[23:], 1 / 40)
    assert np.all(np.diff(ratio[10:24]) < 0)
    assert with_temperature.magnitude == pytest.approx(1 + 0.1 * math.log(40))
    on_scores = rope_from(hparams(**values, rope__scaling__yarn_log_multiplier=0.1), 64, True)
    assert on_scores.magnitude == 1
    assert yarn_mscale(40, 0.1) == pytest.approx(1.3688879)
    assert yarn_mscale(1, 0.1) == 1


def test_unknown_scaling_is_refused():
    with pytest.raises(PlanError, match="'dynamic' is not supported"):
        rope_from(hparams(rope__scaling__type="dynamic"), 8, True)
