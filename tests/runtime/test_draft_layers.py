"""Draft layers (multi-token prediction): predictions as modelling code makes them, never part of the model, drafting."""

import numpy as np
import pytest
from checkpoint_cases import EXACT, TOLERANCE
from draft_cases import DRAFT_CASES, convert_draft_case

from ggufmill.formats import PlanError, open_gguf
from ggufmill.quantize import gguf_source
from ggufmill.quantize.prune import drop_draft_layers
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.draft_head import window_rows
from ggufmill.runtime.embedding import embed_tokens


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    made = {}

    def convert(case):
        if case not in made:
            made[case] = convert_draft_case(case, tmp_path_factory.mktemp(case))
        return made[case]

    return convert


@pytest.mark.parametrize("case", DRAFT_CASES)
def test_model_and_draft_layers_predict_as_transformers(case, converted):
    made = converted(case)
    model = load_model(made.path, **EXACT)
    assert open_gguf(made.path).metadata[f"{model.graph.architecture}.nextn_predict_layers"] == DRAFT_CASES[case].count
    assert np.abs(model.logits(made.tokens) - made.logits).max() < TOLERANCE  # the draft layers are no part of the model
    hidden = model.hidden([(model.new_cache(len(made.tokens)), made.tokens)])[0]
    rows = window_rows(model, made.tokens, hidden)
    assert len(rows) == DRAFT_CASES[case].count
    for head, outputs, expected in zip(model.draft_heads, rows, made.draft_logits, strict=True):
        assert np.abs(head.logits(outputs) - expected).max() < TOLERANCE


@pytest.mark.parametrize("case", ["v3", "glm4moe", "qwen35", "mimo2", "step35"])
def test_reference_backend_runs_the_same_draft_graph(case, converted):
    made = converted(case)
    model = load_model(made.path, **EXACT)
    hidden = model.hidden([(model.new_cache(len(made.tokens)), made.tokens)])[0]
    executable = reference.compile_graph(model.draft_heads[0].executable.graph, model.source)
    rows = executable.hidden(made.tokens[1:], [(executable.new_cache(200), len(made.tokens) - 1)], hidden[:-1])
    assert np.abs(executable.logits(rows) - made.draft_logits[0]).max() < TOLERANCE


def test_embeddings_come_from_behind_the_last_norm(converted):
    """Also where the draft layers read the residual stream before it."""
    path = converted("step35").path
    source = gguf_source(path)
    with_drafts, without = (load_model(each, **EXACT) for each in (source, drop_draft_layers(source)))
    tokens = converted("step35").tokens[:20].tolist()
    [first], [second] = (list(embed_tokens(model, [tokens], "mean", normalize=False)) for model in (with_drafts, without))
    assert not np.allclose(with_drafts.hidden([(with_drafts.new_cache(20), tokens)])[0].mean(axis=0), second, rtol=1e-2)
    assert np.allclose(first, second, rtol=1e-4, atol=1e-5)


def test_rows_one_by_one_are_those_of_one_pass(converted):
    made = converted("glm4moe")
    model = load_model(made.path, **EXACT)
    hidden = model.hidden([(model.new_cache(len(made.tokens)), made.tokens)])[0]
    head = model.draft_heads[0]
    cache = head.new_cache(100)
    rows = [head.hidden(cache, made.tokens[at + 1 : at + 2], hidden[at : at + 1]) for at in range(12)]
    assert np.abs(head.logits(np.concatenate(rows)) - made.draft_logits[0][:12]).max() < TOLERANCE


def test_model_without_draft_layers_has_no_draft_heads(tmp_path):
    made = convert_draft_case("qwen35", tmp_path / "without", mtp=False)
    gguf = open_gguf(made.path)
    assert not any("nextn" in name for name in gguf.tensors)
    assert "qwen35.nextn_predict_layers" not in gguf.metadata
    model = load_model(made.path, **EXACT)
    assert np.abs(model.logits(made.tokens) - made.logits).max() < TOLERANCE
    assert model.draft_heads == []
    with pytest.raises(PlanError, match="has no draft layers"):
        model.generate([3, 4], 4, draft_max=2)
