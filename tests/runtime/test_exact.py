"""Quantised models: with activations rounded on the way, and exactly."""

import dataclasses

import numpy as np
import pytest

from ggufmill.formats import TYPES
from ggufmill.pipeline.common.models import open_generating_model, open_model
from ggufmill.quantize import decode, encode
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.cpu.kernels.gemm.vector_products import has_bf16_dots
from ggufmill.simd.instructions import amx


def stored_as(tensor, name):
    columns = tensor.shape[0]
    q = encode(tensor.read(0, tensor.n_rows), name)

    def read(start, stop):
        return decode(q[start:stop], name, columns)

    def raw(start, stop):
        return q[start:stop]

    return dataclasses.replace(tensor, source_type=name, read=read, raw=raw, stored=TYPES[name], mapped=q)


def as_type(source, name):
    """The source with every matrix whose rows fit stored as a type."""
    changed = {
        key: stored_as(tensor, name) if len(tensor.shape) > 1 and TYPES[name].fits(tensor.shape[0]) else tensor
        for key, tensor in source.tensors.items()
    }
    return dataclasses.replace(source, tensors=changed)


@pytest.mark.parametrize(
    ("name", "rounds", "bound"),
    [("q8_0", False, 0.02), ("q4_0", False, 0.02), ("bf16", False, 2e-4), ("bf16", True, 0.02), ("f16", True, 0.02)],
)
@pytest.mark.parametrize("tiles", [True, False])
def test_rounded_activations_change_logits_little(tiny, monkeypatch, name, rounds, bound, tiles):
    """bound: of the differences' root mean square, as a share of that of the logits."""
    if tiles and not amx.permitted():
        pytest.skip("this processor has no bf16 tiles")
    monkeypatch.setattr(amx, "permitted", lambda: tiles)
    source = as_type(tiny, name)
    tokens = np.random.default_rng(0).integers(0, 258, 40)
    fast, exact = (load_model(source, exact=exact, fast=rounds).logits(tokens) for exact in (False, True))
    plain = dataclasses.replace(source, tensors={k: dataclasses.replace(t, raw=None) for k, t in source.tensors.items()})
    decoded = load_model(plain).logits(tokens)
    scale = np.sqrt(np.mean(decoded**2))
    assert np.sqrt(np.mean((fast - decoded) ** 2)) < bound * scale
    if rounds and (tiles or has_bf16_dots()):
        assert np.sqrt(np.mean((fast - decoded) ** 2)) > 2e-4 * scale  # they were rounded
    assert np.sqrt(np.mean((exact - decoded) ** 2)) < 2e-4 * scale


def test_text_is_generated_with_rounded_activations(tiny):
    """And quality is measured without, unless asked."""
    source = as_type(tiny, "bf16")
    assert open_generating_model(source, {}).settings.fast is True
    assert open_generating_model(source, {"fast": False}).settings.fast is False
    loaded = open_model(source, {})
    assert not loaded.settings.fast
    assert open_generating_model(loaded, {}) is loaded
