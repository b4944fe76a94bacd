"""What is said of a model whose results are not finite: the tensor at fault, whatever backend runs it."""

import dataclasses

import numpy as np
import pytest

from ggufmill.formats import MillError
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.reference import compile_graph
from ggufmill.runtime.finite_check import FiniteCheck
from ggufmill.runtime.models.architectures import build_graph


def damaged(source, name, matrix=0):
    """The source with a NaN in one matrix of a tensor."""
    tensor = source.tensors[name]
    row = matrix * (tensor.shape[1] if len(tensor.shape) > 1 else 1)

    def read(start, stop):
        rows = np.array(tensor.read(start, stop))
        if start <= row < stop:
            rows[row - start, 1] = np.nan
        return rows

    changed = dataclasses.replace(tensor, read=read, raw=None, stored=None, mapped=None)
    return dataclasses.replace(source, tensors=source.tensors | {name: changed})


def by_reference(source, tokens):
    model = compile_graph(build_graph(source), source)
    model.observer = FiniteCheck(source, "f32")
    model.logits(model.hidden(tokens, [(model.new_cache(len(tokens)), len(tokens))]))


def by_cpu(source, tokens):
    error = load_model(source, exact=True).first_nonfinite(tokens)
    if error is not None:
        raise error


@pytest.mark.parametrize("run", [by_reference, by_cpu])
@pytest.mark.parametrize(
    ("name", "matrix"),
    [
        ("blk.0.attn_norm.weight", None),
        ("blk.1.attn_q_b.weight", None),
        ("blk.1.attn_kv_b.weight", None),
        ("blk.1.ffn_gate_inp.weight", None),
        ("blk.2.ffn_up_exps.weight", 5),
        ("blk.2.ffn_down_exps.weight", 3),
        ("blk.2.ffn_up_shexp.weight", None),
        ("output_norm.weight", None),
        ("output.weight", None),
    ],
)
def test_the_damaged_tensor_is_named(build, tokens, run, name, matrix):
    source = damaged(build("v3", "legacy"), name, matrix or 0)
    with pytest.raises(MillError) as error:
        run(source, tokens)
    what = name if matrix is None else f"{name} (matrix {matrix})"
    assert str(error.value) == f"test model: the first output that is not finite (NaN or infinity) is that of {what}"


@pytest.mark.parametrize("run", [by_reference, by_cpu])
def test_sound_weights_that_overflow(build, tokens, run):
    """Nothing is damaged: the first product beyond the range of float32 is named."""
    source, name = build("v3", "legacy"), "blk.1.attn_q_b.weight"
    tensor = source.tensors[name]

    def read(start, stop):
        return tensor.read(start, stop) * np.float32(3e38)

    large = dataclasses.replace(tensor, read=read, raw=None, stored=None, mapped=None)
    assert np.isfinite(read(0, tensor.n_rows)).all()
    with pytest.raises(MillError, match=r"is that of blk\.1\.attn_q_b\.weight$"):
        run(dataclasses.replace(source, tensors=source.tensors | {name: large}), tokens)
