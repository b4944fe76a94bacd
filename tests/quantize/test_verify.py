"""Verification of written files: encoders that are wrong every time, so that the bytes alone tell nothing."""

from dataclasses import replace

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.jobs.execute import execute
from ggufmill.quantize import encode
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.verify import _error_bound, verify

NAME = "blk.0.ffn_up.weight"
FEW_BITS = ("q2_K", "iq1_bn", "tq2_0", "iq2_ks", "q2_k_r4")


def _problems(tmp_path, x, type_name, change=lambda x: x):
    """What --verify finds when change(x) is encoded instead of x."""
    source = TensorSource("t", {}, {NAME: SourceTensor(NAME, x.shape[::-1], "f32", lambda start, stop: x[start:stop])}, "")
    plan = plan_quantize(source, tmp_path / "o.gguf", type=TYPES[type_name])
    changed = change(x)
    outputs = [replace(o, produce=lambda start, stop: encode(changed[start:stop], type_name)) for o in plan.outputs]
    plan = replace(plan, outputs=outputs)
    execute(plan, force=True)
    return verify(plan, source).problems


def _weights():
    return np.random.default_rng(3).standard_t(5, (64, 512)).astype(np.float32)


@pytest.mark.parametrize("type_name", FEW_BITS)
def test_zeros_are_found(tmp_path, type_name):
    assert "the error of its weights is 1, at most 0." in _problems(tmp_path, _weights(), type_name, np.zeros_like)[0]


@pytest.mark.parametrize("type_name", FEW_BITS)
def test_shuffled_weights_are_found(tmp_path, type_name):
    assert _problems(tmp_path, _weights(), type_name, lambda x: np.random.default_rng(1).permuted(x, axis=1))


def test_shuffled_weights_that_are_nearly_alike_are_found(tmp_path):
    x = 1 + _weights() * np.float32(0.1)  # shuffled, their error is 0.18
    assert not _problems(tmp_path, x, "q4_1")
    assert _problems(tmp_path, x, "q4_1", lambda x: np.roll(x, 37, axis=1))


@pytest.mark.parametrize("type_name", [*FEW_BITS, "q4_K", "q8_0"])
@pytest.mark.parametrize("weights", [_weights, lambda: np.zeros((64, 512), np.float32), lambda: np.ones((64, 512), np.float32)])
def test_correct_weights_pass(tmp_path, type_name, weights):
    assert not _problems(tmp_path, weights(), type_name)


def test_weights_of_few_bits_that_follow_others_may_be_far_from_theirs():
    """As iq1_m in the order of the model; of zeros and of shuffled weights the error is that in other columns."""
    assert _error_bound("iq1_m", shuffled=1.5, follows=True) > 1.1
    assert _error_bound("iq1_m", shuffled=1.0, follows=True) < 1.0
    assert _error_bound("iq1_m", shuffled=1.5) < 1.0
