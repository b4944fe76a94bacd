"""Draft layers (multi-token prediction): predictions as modelling code makes them, never part of the model, drafting."""

import numpy as np
import pytest
from checkpoint_cases import EXACT, TOLERANCE
from draft_cases import DRAFT_CASES, convert_draft_case

from ggufmill.formats import PlanError, open_gguf
from ggufmill.runtime import load_model
from ggufmill.runtime.backends import reference
from ggufmill.runtime.draft_head import window_rows


@pytest.fixture(scope="module")
def converted(tmp_path_factory):
    made = {}

    def convert(case):
        if case not in made:
            made[case] = convert_draft_case(case, tmp_path_factory.mktemp(case))
        return made[case]

    return convert


@pytest.mark.parametrize("case", DRAFT_CASES)
def test_model_and_draft_layer_predict_as_transformers(case, converted):
    made = converted(case)
    model = load_model(made.path, **EXACT)
    assert open_gguf(made.path).metadata[f"{model.graph.architecture}.nextn_predict_layers"] == 1
    assert np.abs(model.logits(made.tokens) - made.logits).max() < TOLERANCE  # the draft layer is no part of the model
    hidden = model.hidden([(model.new_cache(len(made.tokens)), made.tokens)])[0]
    [rows] = window_rows(model, made.tokens, hidden)
    assert np.abs(model.draft_heads[0].logits(rows) - made.draft_logits).max() < TOLERANCE


@pytest.mark.parametrize("case", ["v3", "glm4moe", "qwen35"])
def test_reference_backend_runs_the_same_draft_graph(case, converted):
    made = converted(case)
    model = load_model(made.path, **EXACT)
    hidden = model.hidden([(model.new_cache(len(made.tokens)), made.tokens)])[0]
    executable = reference.compile_graph(model.draft_heads[0].executable.graph, model.source)
    rows = executable.hidden(made.tokens[1:], [(executable.new_cache(200), len(made.tokens) - 1)], hidden[:-1])
    assert np.abs(executable.logits(rows) - made.draft_logits).max() < TOLERANCE


def test_rows_one_by_one_are_those_of_one_pass(converted):
    made = converted("glm4moe")
    model = load_model(made.path, **EXACT)
    hidden = model.hidden([(model.new_cache(len(made.tokens)), made.tokens)])[0]
    head = model.draft_heads[0]
    cache = head.new_cache(100)
    rows = [head.hidden(cache, made.tokens[at + 1 : at + 2], hidden[at : at + 1]) for at in range(12)]
    assert np.abs(head.logits(np.concatenate(rows)) - made.draft_logits[:12]).max() < TOLERANCE


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
