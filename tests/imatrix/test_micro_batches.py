"""Random models of many kinds: the same sums and scores whatever the size of micro-batches is."""

import checkpoint_cases as checkpoints
import numpy as np
import pytest

from ggufmill.imatrix.collect import CollectOptions, collect
from ggufmill.imatrix.covariance.collector import CovarianceCollector
from ggufmill.imatrix.covariance.inputs import covariance_inputs
from ggufmill.runtime import load_model, micro_batches
from ggufmill.runtime.evaluate.perplexity import perplexity

pytestmark = pytest.mark.oracle

N_CTX = 50  # more than the windows of the models
KINDS = {
    "cohere2": "sliding windows",
    "mixtral": "experts",
    "llama4-chunks": "chunks of tokens that see each other, experts",
    "deepseek32": "an indexer that selects keys, latent attention, experts",
    "deepseek4": "compressed entries, experts",
    "qwen4exp": "several streams",
    "gemma3n": "a matrix that multiplies two values",
    "qwen3next": "the gated delta rule, experts",
    "kimi-linear": "delta attention, latent attention, experts",
    "jamba": "selective scans, experts",
    "lfm2": "short convolutions",
}


@pytest.fixture(scope="module", params=KINDS)
def path(request, tmp_path_factory):
    return checkpoints.convert_case(request.param, tmp_path_factory.mktemp("model"))[2]


@pytest.mark.parametrize(
    ("piece", "sizes"), [(micro_batches.PIECE, (3 * N_CTX, N_CTX, 2 * N_CTX - 1, 1)), (20, (3 * N_CTX, 1))]
)
def test_micro_batches_make_no_difference(path, piece, sizes, monkeypatch):
    """piece: windows are divided, too."""
    monkeypatch.setattr("ggufmill.runtime.model.PIECE", piece)
    ids, made = np.random.default_rng(5).integers(3, checkpoints.COMMON["vocab_size"], 4 * N_CTX), []
    for ubatch in sizes:
        model = load_model(path, batch=3 * N_CTX, ubatch=ubatch, threads=2)
        figures = perplexity(model, ids, n_ctx=N_CTX).window_losses
        alone, _ = collect(model, ids, n_ctx=N_CTX, options=CollectOptions(output=True))
        covariance, parts = CovarianceCollector(covariance_inputs(model.graph, experts=True), model.workers), {}
        beside, _ = collect(model, ids, n_ctx=N_CTX, options=CollectOptions(head_inputs=True), covariance=covariance)
        covariance.each_part(lambda *part, parts=parts: parts.update({part[:2]: (part[2].matrix.tobytes(), part[2].tokens)}))
        entries = [{name: [x.tobytes() for x in entry] for name, entry in each.entries.items()} for each in (alone, beside)]
        made.append((figures, *entries, parts))
    assert all(len(one.tensors) for one in covariance.inputs)
    assert len({one.name for one in covariance.inputs}) == len(covariance.inputs)
    assert made[1:] == made[:1] * (len(sizes) - 1)
