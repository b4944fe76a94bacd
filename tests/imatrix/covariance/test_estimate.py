"""Seconds of a collection: what is counted, by speeds that are given."""

from collections import Counter
from functools import partial

import numpy as np
import pytest
from small_models import latent, llama

from ggufmill.imatrix.covariance import estimate
from ggufmill.imatrix.covariance.collector import CovarianceCollector
from ggufmill.imatrix.covariance.inputs import covariance_inputs
from ggufmill.imatrix.covariance.outputs import covariance_outputs
from ggufmill.imatrix.covariance.sums import Sums
from ggufmill.runtime import load_model


@pytest.mark.parametrize("make", [partial(llama, experts=4), latent])
def test_rows_are_summed_by_the_columns_of_each_input(make, monkeypatch):
    """Of experts those that a token is sent to, of heads all, also where they have one matrix; text is run observed, in every
    pass."""
    observed, added = [], Counter()

    def layers(model, tokens, n_ctx, *, is_observed):
        observed.append(is_observed)
        return 1.0

    monkeypatch.setattr(estimate, "layers_seconds", layers)
    monkeypatch.setattr(estimate, "head_seconds", lambda model, tokens: 0.5)
    monkeypatch.setattr(estimate, "_seconds_of_row", lambda columns, rows, threads: float(columns * rows))
    monkeypatch.setattr(estimate, "waiting", lambda: 1.0)
    monkeypatch.setattr(estimate, "_KEEPING", 0.0)
    model = load_model(make(), threads=2)
    inputs = [one for one in covariance_inputs(model.graph, True) if one.layer is not None]
    running, sums = estimate.expected_seconds(model, inputs, 10, 512, 3)
    assert (running, observed) == (3.5 / 2, [True])

    def add(self, x, weight, workers):
        added[self.columns * self.block] += len(x)

    monkeypatch.setattr(Sums, "add", add)
    with model.observing(CovarianceCollector(inputs, model.workers)):
        model.hidden_of_windows(np.arange(10)[None])
    assert sums == pytest.approx(sum(size * rows for size, rows in added.items()) / 2)


def test_rows_of_gradients_of_experts_are_those_of_the_blocks_of_experts_that_are_used():
    model = load_model(llama(experts=4))
    outputs = {one.weight: one for one in covariance_outputs(model.graph, 8)}
    one, used = outputs["blk.0.ffn_up_exps.weight"], model.metadata["llama.expert_used_count"]
    assert one.blocks.count > 1
    assert one.rows_of_token == used * one.blocks.count
    assert outputs["blk.0.attn_q.weight"].rows_of_token == outputs["blk.0.attn_q.weight"].blocks.count


def test_a_row_is_measured_once_for_each_width():
    assert estimate._seconds_of_row(64, 128, 2) > 0
    assert estimate._seconds_of_row(estimate._COLUMNS * 2, 512, 1) == 4 * estimate._seconds_of_row(estimate._COLUMNS, 512, 1)
