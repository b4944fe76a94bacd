"""The divergence that a type is predicted to cause, from sampled rows that are encoded together."""

import numpy as np
import pytest

from ggufmill.formats import TYPES, SourceTensor
from ggufmill.quantize import decode, encode
from ggufmill.quantize.covariance.coupling import couple
from ggufmill.quantize.covariance.matrix.covariance_matrix import Covariance
from ggufmill.quantize.covariance.row_blocks import row_blocks
from ggufmill.quantize.covariance.source import CollectedInput, CollectedOutput, Covariances, Curvature, PreparedCache
from ggufmill.quantize.search.row_sample import sample_rows

NAME, COLUMNS, TEXT = "blk.0.ffn_down_exps.weight", 256, 8000


def moments(seed: int, size: int, tokens: int, scale: float = 1.0) -> Covariance:
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((2000, 12)) @ rng.standard_normal((12, size)) + rng.standard_normal((2000, size))
    matrix = (scale * (x.T @ x) / 2000).astype(np.float32)
    return Covariance((matrix + matrix.T) / np.float32(2), tokens)


class Model:
    """Three experts of 64 rows, in blocks of 32, that saw different numbers of tokens."""

    def __init__(self, tokens=(4000, 2000, 1000), rows: int = 64, size: int = 32):
        self.tokens, self.blocks = tokens, row_blocks(rows, rows, size)
        x = np.random.default_rng(0).standard_normal((rows * len(tokens), COLUMNS), dtype=np.float32) * np.float32(0.02)
        self.tensor = SourceTensor(NAME, (COLUMNS, rows, len(tokens)), "f32", lambda start, stop: x[start:stop])
        self.inputs = [moments(i, COLUMNS, 5000) for i in range(len(tokens))]
        self.outputs = {
            (m, b): moments(10 * m + b + 50, size, seen, 1e-2 * (1 + m))
            for m, seen in enumerate(tokens)
            for b in range(self.blocks.count)
        }

    def covariances(self) -> Covariances:
        seen = np.repeat(np.array(self.tokens)[:, None], self.blocks.count, 1)
        curvature = Curvature(lambda name: CollectedOutput(self.blocks, seen), lambda name, m, b: self.outputs[m, b], TEXT)
        cache = PreparedCache(lambda name, matrix: self.inputs[matrix])
        collected = CollectedInput(COLUMNS, np.full(len(self.tokens), 5000))
        return Covariances(lambda name: collected, cache, "digest", {}, curvature=curvature)

    def expected(self, type_name: str) -> float:
        """1/2 tr(A R H R^T) in float64, times the share of tokens, over all blocks."""
        total = 0.0
        for (m, b), a in self.outputs.items():
            span = self.blocks.span(b)
            x = self.tensor.read(m * self.blocks.rows + span.start, m * self.blocks.rows + span.stop)
            q = encode(x, type_name, None, self.inputs[m], coupled=couple(a))
            r = x - decode(q, type_name, COLUMNS).astype(np.float64)
            h, a64 = self.inputs[m].damped().astype(np.float64), a.damped(0.05).astype(np.float64)
            total += 0.5 * a.tokens / TEXT * np.einsum("ij,jk,kl,il->", a64, r, h, r, optimize=True)
        return total


@pytest.mark.parametrize("type_name", ["q4_0", "iq2_k", "iq2_xxs"])
def test_all_rows_give_half_the_trace_for_each_token(type_name):
    model = Model()
    sample = sample_rows(model.tensor, None, 192, 0, model.covariances())
    assert sample.error(TYPES[type_name]) == pytest.approx(model.expected(type_name), rel=1e-3)


def test_few_rows_stand_for_all():
    model = Model(tokens=(4000,) * 3, rows=256, size=256)
    whole, part = (sample_rows(model.tensor, None, rows, 0, model.covariances()) for rows in (768, 64))
    assert sum(len(run.x) for run in part.runs) == 128
    for name in ("q4_0", "iq2_k"):
        assert part.error(TYPES[name]) == pytest.approx(whole.error(TYPES[name]), rel=0.3)


def test_few_tokens_leave_the_rows_alone():
    """Their gradients' mean squares weigh each row still."""
    model = Model(tokens=(10, 10, 10))
    sample = sample_rows(model.tensor, None, 192, 0, model.covariances())
    total = 0.0
    for (m, b), a in model.outputs.items():
        span = model.blocks.span(b)
        x = model.tensor.read(m * 64 + span.start, m * 64 + span.stop)
        r = x - decode(encode(x, "q4_0", None, model.inputs[m]), "q4_0", COLUMNS).astype(np.float64)
        errors = ((r @ model.inputs[m].damped().astype(np.float64)) * r).sum(1)
        total += 0.5 * 10 / TEXT * (errors * a.diagonal).sum()
    assert sample.error(TYPES["q4_0"]) == pytest.approx(total, rel=1e-4)


def test_finer_types_lose_less():
    model = Model()
    sample = sample_rows(model.tensor, None, 64, 0, model.covariances())
    errors = [sample.error(TYPES[name]) for name in ("iq2_k", "iq3_k", "q4_K", "q5_K", "q8_0")]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] > 0
