"""Memory that gradients are said to take: what is counted of shapes is what real numbers take."""

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from checkpoint_cases import convert_record
from recorded_models import kept_cases

from ggufmill.quantize import gguf_source
from ggufmill.runtime.backends.torch.drawn_labels import loss_gradient
from ggufmill.runtime.backends.torch.gradient_cost import _LOGIT_BYTES, CountedGradients, ShapeGradients, _Counted
from ggufmill.runtime.backends.torch.gradients import WindowGroup
from ggufmill.runtime.backends.torch.weights import Weights
from ggufmill.runtime.graph.ops import Attention
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
        said.append(shapes.count(part, windows))
        taken.append(model.counted(part, group))
    decoded = 8 * max(x.n_rows // max(1, x.shape[2] if len(x.shape) > 2 else 1) * x.shape[0] for x in source.tensors.values())
    for (most, handed_over, *_), (real, real_handed_over, *_) in zip(said, taken, strict=True):
        assert handed_over == real_handed_over
        assert most == pytest.approx(real, rel=0.1, abs=decoded)


def test_bytes_of_logits():
    """32 were said: 3.3 GB for an importance matrix with curvature, of a vocabulary of 201,088 tokens, that took 2.9."""
    logits, counted = torch.zeros((8, 4096)), _Counted(WindowGroup(np.zeros((1, 8), np.int64)))
    with torch.no_grad(), counted:
        loss_gradient(logits, np.full(8, 0.5))
    assert logits.nbytes + counted.most == pytest.approx(_LOGIT_BYTES * logits.numel(), rel=0.01)


def test_products_of_attention_are_counted(tmp_path):
    """Scores and their sums of values: forth, again, and twice back."""
    source = gguf_source(convert_record("llama", tmp_path)[1])
    model = CountedGradients(build_graph(source), Weights(source, {}, exact=True))
    attention = next(op for op in model.graph.ops if isinstance(op, Attention))
    heads, width = attention.q.shape
    counted = ShapeGradients(model).count(model.parts[0], np.zeros((2, N), np.int64))
    assert counted.products == 4 * 2 * heads * N * N * 2 * width
    assert counted.written > 4 * 2 * heads * N * N * 4  # scores and weights of the softmax, forth and again, and more
