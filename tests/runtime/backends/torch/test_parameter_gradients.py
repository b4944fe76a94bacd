"""Gradients of norms and scales of quantised models, against differences of the divergence."""

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoint_cases import convert_record

from ggufmill import quantize_model
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch.parameter_gradients import ParameterGradients
from ggufmill.runtime.backends.torch.tunable import TunableWeights
from ggufmill.runtime.backends.torch.weights import Weights

pytestmark = pytest.mark.oracle

N = 24  # tokens of a window


@pytest.mark.parametrize("case", ["llama", "v2-lite", "gemma3n", "mamba", "qwen35"])
def test_gradients_are_those_of_differences(tmp_path, case):
    record, path = convert_record(case, tmp_path / "original")
    quantize_model(path, tmp_path / "q.gguf", "q4_0", pure=True, leave_output_tensor=True)
    original, model = load_model(path, threads=1, exact=True), load_model(tmp_path / "q.gguf", threads=1)
    windows = np.asarray(record.tokens[: 2 * N], np.int64).reshape(2, N)
    hidden = original.hidden_of_windows(windows)
    weights = TunableWeights(model.stored, model.graph, scales=True)
    job = ParameterGradients(model.graph, weights, original.graph, Weights(original.stored, {}, exact=True), 1)
    _, found = job.of_windows(windows, hidden, with_gradients=True)
    assert len(found) > 0.8 * (len(weights.vectors) + len(weights.matrices))
    changes = weights.vectors | {name: tuned.changes for name, tuned in weights.matrices.items()}
    for kind, size in ((weights.vectors, 3e-4), (weights.matrices, 2e-3)):
        names, losses = [name for name in kind if name in found], []
        assert names
        # More than what scales in float16 are rounded by, and not so much that many other experts are chosen.
        directions = {name: np.float32(size) * np.sign(found[name]) for name in names}
        for sign in (1, -1):
            for name in names:
                changes[name][...] = sign * directions[name]
            weights.apply()
            losses.append(job.of_windows(windows, hidden, with_gradients=False)[0])
        for name in names:
            changes[name][...] = 0
        weights.apply()
        expected = sum(float((found[name] * directions[name]).sum()) for name in names)
        assert (losses[0] - losses[1]) / 2 == pytest.approx(expected, rel=0.06)
