"""Weights larger than a device: copied there layer by layer, once for many windows, with the results of those that stay."""

import numpy as np
import pytest

pytest.importorskip("torch")
from checkpoint_cases import convert_case
from op_graphs import DEVICE

from ggufmill.formats import PlanError
from ggufmill.imatrix.collect import CollectOptions, collect
from ggufmill.runtime import load_model
from ggufmill.runtime.backends.torch import weights as weights_module
from ggufmill.runtime.evaluate.perplexity import perplexity
from ggufmill.runtime.placement.memory import layer_number

pytestmark = pytest.mark.oracle

CASES = ("llama", "v3", "qwen35", "gemma4", "gemma3n")


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    tokens, expected, path = convert_case(request.param, tmp_path_factory.mktemp(request.param))
    return np.tile(tokens, 6)[:512], path, expected


def sizes(model):
    """Bytes of each layer's tensors on the device; -1: of those of none."""
    out = {}
    for name, tensor in model.source.tensors.items():
        if model.placed.placement.places[name][0] != "CPU":
            number = layer_number(name)
            out[number] = out.get(number, 0) + tensor.stored.nbytes(tensor.shape)
    return out


def models(path, **options):
    """The same model with all weights on the device, and with room for two layers beside the output."""
    whole = load_model(path, device=DEVICE, threads=1, ubatch=64, exact=True, **options)
    own = sizes(whole)
    largest = max(own.values())
    limit = own.get(-1, 0) + own[0] + largest
    return whole, load_model(
        path, device=DEVICE, threads=1, ubatch=64, exact=True, device_memory=min(limit, sum(own.values()) - 1), **options
    )


class Counted(weights_module.PackedMatrix):
    made = 0

    def __init__(self, *arguments):
        Counted.made += 1
        super().__init__(*arguments)


def test_perplexity_is_the_same_and_layers_are_copied_once_for_all_windows(case, monkeypatch):
    tokens, path, _ = case
    whole, part = models(path)
    expected = perplexity(whole, tokens, n_ctx=32)
    found = perplexity(part, tokens, n_ctx=32)
    assert found.perplexity == expected.perplexity
    assert part.settings.batch == 32768
    monkeypatch.setattr(weights_module, "PackedMatrix", Counted)
    batch = [(part.new_cache(40), window) for window in tokens.reshape(-1, 32)]
    Counted.made = 0
    part.hidden(batch)
    copies = Counted.made
    streamed = [name for name, home in part.executable.weights.homes.items() if home is None]
    assert 0 < copies <= len(streamed)
    assert {layer_number(name) for name in streamed} >= {part.n_layers - 1}
    assert all(cache.length == 32 for cache, _ in batch)
    again = [(whole.new_cache(40), window) for window in tokens.reshape(-1, 32)]
    whole.hidden(again)
    more = [model.hidden([(cache, window[:3]) for cache, window in each]) for model, each in ((part, batch), (whole, again))]
    assert all(np.abs(a - b).max() < 1e-5 for a, b in zip(*more, strict=True))  # the caches go on


def test_importance_matrices_are_the_same(case):
    tokens, path, _ = case
    results = [collect(model, tokens, n_ctx=64, options=CollectOptions(output=True)) for model in models(path)]
    (expected, first), (found, second) = results
    assert found.entries.keys() == expected.entries.keys()
    for name, (sums, counts) in expected.entries.items():
        assert np.array_equal(found.entries[name][0], sums), name
        assert np.array_equal(found.entries[name][1], counts)
    assert second.perplexity == first.perplexity


def test_a_text_longer_than_a_pass(case):
    tokens, path, expected = case
    _, part = models(path)
    assert np.abs(part.logits(tokens[: len(expected)]) - expected).max() < 1e-4


def test_a_limit_below_the_largest_layer_is_refused(case):
    with pytest.raises(PlanError, match="--device-memory 10 bytes: the largest layer on"):
        load_model(case[1], device=DEVICE, device_memory=10)


def test_a_limit_that_is_large_enough_changes_nothing(case):
    model = load_model(case[1], device=DEVICE, device_memory=1 << 40)
    assert None not in model.executable.weights.homes.values()
