"""Verification of written files: encoders that are wrong every time, so that the bytes alone tell nothing."""

from dataclasses import replace

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor, TensorSource
from ggufmill.jobs.execute import execute
from ggufmill.pipeline.writing.forecast import verifying_seconds
from ggufmill.quantize import encode
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.verify import _error_bound, sampled_weights, verify

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


def test_as_many_weights_are_compared_and_encoded_again_as_is_said(tmp_path):
    shapes = {
        "blk.0.ffn_gate.weight": (512, 0),
        "blk.0.ffn_up.weight": (512, 300),
        "blk.0.ffn_down_exps.weight": (256, 40, 7),
        "blk.0.attn_norm.weight": (512,),
    }
    data = {name: np.random.default_rng(1).standard_normal(shape[::-1], np.float32) for name, shape in shapes.items()}
    rows = {name: x.reshape(-1, x.shape[-1]) for name, x in data.items()}
    given = {n: SourceTensor(n, shape, "f32", lambda i, j, n=n: rows[n][i:j]) for n, shape in shapes.items()}
    source, encoded = TensorSource("t", {}, given, ""), []
    plan = plan_quantize(source, tmp_path / "o.gguf", type=TYPES["q4_0"])

    def watched(output):
        def produce(start, stop):
            made = output.produce(start, stop)
            encoded.append((output.type.name, made.shape[0] * output.shape[0]))
            return made

        return replace(output, produce=produce)

    execute(plan, force=True)
    seconds = verifying_seconds(plan, {"q4_0": 3.0}, 2)
    plan = replace(plan, outputs=[watched(output) for output in plan.outputs])
    compared, again = sampled_weights(plan)
    assert seconds == pytest.approx(2 * 3.0 * again["q4_0"] / 225280 + 8e-9 * compared)
    checks = verify(plan, source).tensors
    assert compared == sum(check.rows * shapes[check.name][0] for check in checks)
    assert again == {"q4_0": sum(count for name, count in encoded if name == "q4_0")}


def test_rows_that_are_encoded_together_are_counted_with_the_others(tmp_path):
    given = {NAME: SourceTensor(NAME, (4096, 64), "f32", lambda start, stop: np.zeros((stop - start, 4096), np.float32))}
    plan = plan_quantize(TensorSource("t", {}, given, ""), tmp_path / "o.gguf", type=TYPES["q4_0"])
    plan = replace(plan, outputs=[replace(output, cuts=(0, 16, 48)) for output in plan.outputs])
    sampled = [range(0, 4), range(20, 24), range(40, 44), range(60, 64)]  # of [0, 16), [16, 48) twice, and [48, 64)
    assert sampled_weights(plan) == (4096 * sum(map(len, sampled)), {"q4_0": 4096 * (16 + 32 + 32 + 16)})
