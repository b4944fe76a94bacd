"""Seconds of a collection: what is counted, by speeds that are given."""

import pytest
from small_models import llama

from ggufmill.imatrix.covariance import estimate
from ggufmill.imatrix.covariance.inputs import covariance_inputs
from ggufmill.runtime import load_model


def test_tokens_are_summed_by_the_columns_of_each_input(monkeypatch):
    """Experts see a token once, as if they were one; text is run observed, in every pass."""
    observed = []

    def layers(model, tokens, n_ctx, *, is_observed):
        observed.append(is_observed)
        return 1.0

    monkeypatch.setattr(estimate, "layers_seconds", layers)
    monkeypatch.setattr(estimate, "head_seconds", lambda model, tokens: 0.5)
    monkeypatch.setattr(estimate, "_seconds_of_token", lambda columns, threads: float(columns))
    monkeypatch.setattr(estimate, "_KEEPING", 0.0)
    model = load_model(llama(experts=4), threads=2)
    inputs = covariance_inputs(model.graph, True)
    running, sums = estimate.expected_seconds(model, inputs, 10, 512, 3)
    assert (running, observed) == (3.5 / 2, [True])
    assert sums == pytest.approx(10 * sum(one.columns for one in inputs) / 2)
    assert any(one.is_stack_of_experts and one.matrices == 4 for one in inputs)


def test_a_token_is_measured_once_for_each_width():
    assert estimate._seconds_of_token(64, 2) > 0
    assert estimate._seconds_of_token(estimate._COLUMNS * 2, 1) == 4 * estimate._seconds_of_token(estimate._COLUMNS, 1)
