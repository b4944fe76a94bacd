"""Importance data of draft layers (--nextn), what quantisation says without, and the rating of the draft layer (--mtp)."""

import json
import pickle
from dataclasses import replace

import numpy as np
import pytest
from checkpoint_cases import EXACT
from draft_cases import convert_draft_case, rms

from ggufmill import compute_imatrix, plan_memory, quantize_model
from ggufmill.formats import open_gguf
from ggufmill.imatrix.calibration import TextSegment, cut_windows
from ggufmill.imatrix.collect import CollectOptions, collect, run_batch
from ggufmill.quantize import gguf_source
from ggufmill.quantize.prune import draft_layer_prefixes, draft_layers, drop_draft_layers, drop_layers
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.perplexity import perplexity, run_windows
from ggufmill.runtime.models.architectures import DRAFTING

WINDOW = 30
CASE_OF = {"deepseek2": "v3-two", "glm4moe": "glm4moe-three", "bailingmoe2": "bailingmoe2-two", "bailingmoe3": "ling3"}
CASE_OF |= {"exaone-moe": "exaone-moe-groups"}  # of others the architecture's name


@pytest.fixture(scope="module", params=["glm4moe", "v3", "qwen35moe"])
def made(request, tmp_path_factory):
    return convert_draft_case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def collected(made):
    model = load_model(made.path, **EXACT)
    return model, collect(model, made.tokens, n_ctx=WINDOW, options=CollectOptions(nextn=True))[0]


@pytest.mark.slow(keep=["step35", "qwen3next"])
@pytest.mark.parametrize("architecture", DRAFTING)
def test_every_matrix_of_the_draft_layers_has_data(tmp_path, architecture):
    made = convert_draft_case(CASE_OF.get(architecture, architecture), tmp_path / "model")
    model = load_model(made.path, **EXACT)
    assert model.source.architecture == architecture
    imatrix, _ = collect(model, made.tokens, n_ctx=WINDOW, options=CollectOptions(output=True, nextn=True))
    matrices = {
        name
        for name, tensor in open_gguf(made.path).tensors.items()
        if name.startswith(draft_layer_prefixes(model.source)) and len(tensor.shape) > 1 and "embed_tokens" not in name
    }
    kv_b = {name for name in matrices if name.endswith(".attn_kv_b.weight")}  # in one layout there are its parts, too
    assert not matrices - imatrix.entries.keys() - kv_b
    for number, layer in enumerate(draft_layers(model.source)):
        assert f"blk.{layer}.attn_output.weight" in matrices
        sums, counts = imatrix.entries[f"blk.{layer}.nextn.eh_proj.weight"]
        assert counts.tolist() == [3 * (WINDOW - 1 - number)]
        assert sums.min() > 0


def test_sums_of_the_projection_are_those_of_the_formula(made, collected):
    model, imatrix = collected
    [layer] = draft_layers(model.source)
    read = {part: model.source.tensors[f"blk.{layer}.nextn.{part}.weight"].read(0, 1)[0] for part in ("enorm", "hnorm")}
    own = f"blk.{layer}.nextn.embed_tokens.weight"
    table = model.source.tensors[own if own in model.source.tensors else "token_embd.weight"].read(0, 288)
    epsilon = model.metadata[f"{model.source.architecture}.attention.layer_norm_rms_epsilon"]
    expected = np.zeros(2 * model.graph.n_embd)
    for window in made.tokens.reshape(3, WINDOW):
        hidden = model.hidden([(model.new_cache(WINDOW), window)])[0]
        e, h = rms(table[window[1:]], read["enorm"], epsilon), rms(hidden[:-1], read["hnorm"], epsilon)
        expected += np.square(np.concatenate([e, h], axis=1), dtype=np.float64).sum(axis=0)
    assert np.allclose(imatrix.entries[f"blk.{layer}.nextn.eh_proj.weight"][0][0], expected, rtol=1e-4)


def test_batches_that_run_elsewhere_add_up_to_the_same(made):
    """With small passes and an output matrix that model and draft layer may share."""
    model, options = (
        load_model(made.path, **EXACT, batch=2 * WINDOW, ubatch=WINDOW - 7),
        CollectOptions(output=True, nextn=True),
    )
    calibration = cut_windows(model, [TextSegment(made.tokens)], WINDOW)

    def run(batches):
        for batch in batches:
            yield pickle.loads(pickle.dumps(run_batch(model, calibration.windows[batch], 1, batch.start, options)))

    one, figures = collect(model, calibration, options=options)
    two, same = collect(model, calibration, options=options, elsewhere=run)
    assert one.entries.keys() == two.entries.keys()
    for name, (sums, counts) in one.entries.items():
        assert np.array_equal(sums, two.entries[name][0])
        assert np.array_equal(counts, two.entries[name][1])
    assert figures.window_losses == same.window_losses

    def score(windows, batches):
        return (pickle.loads(pickle.dumps(run_windows([model], windows[batch], None, True))) for batch in batches)

    here = perplexity(model, made.tokens, n_ctx=WINDOW, mtp=True)
    there = perplexity(model, made.tokens, n_ctx=WINDOW, mtp=True, elsewhere=score)
    assert len(here.mtp) == len(made.draft_logits)
    assert replace(here, tokens_per_second=0) == replace(there, tokens_per_second=0)


def test_the_models_own_data_do_not_change(made, collected):
    model, imatrix = collected
    plain = collect(load_model(made.path, **EXACT), made.tokens, n_ctx=WINDOW)[0]
    [layer] = draft_layers(model.source)
    assert plain.entries.keys() == {name for name in imatrix.entries if not name.startswith(f"blk.{layer}.")}
    for name, (sums, counts) in plain.entries.items():
        assert np.array_equal(sums, imatrix.entries[name][0])
        assert np.array_equal(counts, imatrix.entries[name][1])


def test_draft_layer_is_rated(made):
    model = load_model(made.path, **EXACT)
    result = perplexity(model, made.tokens, n_ctx=len(made.tokens), mtp=True)
    half = len(made.tokens) // 2
    own = made.logits[half:-1].astype(np.float64)
    assert len(result.mtp) == len(made.draft_logits)
    for depth, (figures, logits) in enumerate(zip(result.mtp, made.draft_logits, strict=True)):
        drafts = logits[half - 1 - depth : -1].astype(np.float64)
        log_p = drafts - np.log(np.exp(drafts).sum(axis=1, keepdims=True))
        loss = -log_p[np.arange(len(log_p)), made.tokens[half + 1 :]].mean()
        assert figures.perplexity == pytest.approx(np.exp(loss), rel=1e-4)
        best, p = drafts.argmax(axis=1), np.exp(own) / np.exp(own).sum(axis=1, keepdims=True)
        assert figures.top1_agreement == pytest.approx(100 * (best == own.argmax(axis=1)).mean())
        assert figures.acceptance == pytest.approx(p[np.arange(len(p)), best].mean(), rel=1e-3)
    assert json.loads(json.dumps(result.as_json()))["mtp"][0].keys() == {"perplexity", "top1_agreement", "acceptance"}


def test_layers_left_out_of_a_gguf(made):
    source = gguf_source(made.path)
    [layer] = draft_layers(source)
    without = drop_draft_layers(source)
    architecture = source.architecture
    assert without.metadata[f"{architecture}.block_count"] == layer
    assert without.metadata[f"{architecture}.nextn_predict_layers"] == 0
    assert set(source.tensors) - set(without.tensors) == {n for n in source.tensors if n.startswith(f"blk.{layer}.")}
    shorter, _ = drop_layers(source, [0])
    assert shorter.metadata[f"{architecture}.nextn_predict_layers"] == 1


def test_plans_count_draft_layers_and_say_what_lacks_data(tmp_path):
    made = convert_draft_case("glm4moe", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("hello " * 60)
    result = compute_imatrix(made.path, text, tmp_path / "plain.gguf", n_ctx=32, chunks=2)
    assert "nextn" not in " ".join(result.imatrix.entries)
    rules = {"custom_q": r"blk\.3\.nextn\.eh_proj=iq4_nl,.*=f16", "dry_run": True}

    def plan_with(name):
        return quantize_model(made.path, tmp_path / "q.gguf", "f16", imatrix=tmp_path / name, **rules).plan

    hint = "the imatrix has no data for blk.3.nextn.eh_proj.weight: quantised without (imatrix --nextn collects those of"
    assert any(hint in warning for warning in plan_with("plain.gguf").warnings)
    compute_imatrix(made.path, text, tmp_path / "nextn.gguf", n_ctx=32, chunks=2, nextn=True)
    plan = plan_with("nextn.gguf")
    assert not any("no data" in warning for warning in plan.warnings)
    assert {o.name: o.type.name for o in plan.outputs}["blk.3.nextn.eh_proj.weight"] == "iq4_nl"
    whole, without = (plan_memory(made.path, n_ctx=64, type="f16", mtp=mtp) for mtp in (None, False))
    names = set(whole.chosen.placement.places) - set(without.chosen.placement.places)
    assert names
    assert all(name.startswith("blk.3.") for name in names)
