"""Memory that gradients are said to take: what is counted of shapes is what real numbers take."""

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from checkpoint_cases import convert_record
from recorded_models import kept_cases

from ggufmill.quantize import gguf_source
from ggufmill.runtime.backends.torch.gradient_memory import CountedGradients, ShapeGradients
from ggufmill.runtime.backends.torch.gradients import WindowGroup
from ggufmill.runtime.backends.torch.weights import Weights
from ggufmill.runtime.models.architectures import build_graph

pytestmark = pytest.mark.oracle

N = 256  # tokens of a window, which take more than the weights


@pytest.mark.parametrize("case", kept_cases())
def test_bytes_of_shapes_are_those_of_numbers(tmp_path, case):
    """Of every part of models that have every op: within a tenth, and what decoding takes of these small weights."""
    path = convert_record(case, tmp_path)[1]
    source = gguf_source(path)
    model = CountedGradients(build_graph(source), Weights(source, {}, exact=True))
    shapes, windows = ShapeGradients(model), np.random.default_rng(0).integers(0, model.graph.n_vocab, (2, N))
    group, said, taken = WindowGroup(windows), [], []
    with torch.no_grad():
        for part in model.parts:
            model._forward(part, group)
    group.gradients = {model.graph.hidden.index: torch.ones((windows.size, *model.graph.hidden.shape))}
    for part in reversed(model.parts):
        said.append(shapes.bytes_of(part, windows))
        taken.append(model.counted(part, group))
    decoded = 8 * max(x.n_rows // max(1, x.shape[2] if len(x.shape) > 2 else 1) * x.shape[0] for x in source.tensors.values())
    for (most, handed_over), (real, real_handed_over) in zip(said, taken, strict=True):
        assert handed_over == real_handed_over
        assert most == pytest.approx(real, rel=0.1, abs=decoded)
