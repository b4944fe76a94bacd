from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from small_models import latent, llama

from ggufmill.convert import open_source
from ggufmill.formats import TYPES, MillError
from ggufmill.imatrix import load
from ggufmill.imatrix.batch_sums import BatchSums, squaring_seconds
from ggufmill.imatrix.collect import CollectOptions, Collector, collect, squared_numbers
from ggufmill.jobs.execute import execute
from ggufmill.quantize.planning import plan_quantize
from ggufmill.quantize.recipes.type_selection import is_quantizable
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model
from ggufmill.runtime.evaluate.perplexity import perplexity
from ggufmill.runtime.graph import Observer, ops


@pytest.fixture(scope="module")
def demo():
    """The demo checkpoint (a small trained DeepSeek-V3) and the token ids of a short text."""
    model = load_model(open_source(FOLDER / "demo"))
    return model, model.tokenizer.encode((FOLDER / "demo/calibration.txt").read_text("utf-8")[:2500])


@pytest.fixture(scope="module")
def collected(demo):
    model, tokens = demo
    return collect(model, tokens, dataset="text", n_ctx=128, chunks=4)


def test_every_weight_has_data(demo, collected):
    model, _ = demo
    weights = {t.name for t in model.source.tensors.values() if is_quantizable(t)}
    routers = {n for n in model.source.tensors if n.endswith("ffn_gate_inp.weight")}
    assert set(collected[0].entries) == weights - {"token_embd.weight", "output.weight"} | routers
    assert {"blk.1.attn_kv_b.weight", "blk.1.attn_k_b.weight", "blk.1.attn_v_b.weight"} <= set(collected[0].entries)


def test_counts(collected):
    entries, tokens, used, heads = collected[0].entries, 4 * 128, 2, 4
    assert entries["blk.0.ffn_up.weight"][1].tolist() == [tokens]
    for part in ("gate", "up", "down"):
        _, counts = entries[f"blk.2.ffn_{part}_exps.weight"]
        assert counts.shape == (8,)
        assert counts.sum() == tokens * used
    assert entries["blk.1.attn_k_b.weight"][1].tolist() == [tokens * heads]
    assert collected[0].chunk_count == 4


@pytest.mark.parametrize("options", [CollectOptions(), CollectOptions(head_inputs=True), CollectOptions(output=True)])
@pytest.mark.parametrize("make", [latent, llama, partial(llama, experts=8), partial(open_source, FOLDER / "demo")])
def test_numbers_whose_squares_are_summed(make, options, monkeypatch):
    """Those of inputs that several matrices have once, and of latents where attention does not sum them."""
    added = []

    def add(self, weight, sums, address, offsets, head_step):
        added.append(len(offsets) * sums.size)

    def add_runs(self, weight, inputs, source=()):
        entry = self._leading(weight, source)
        added.append(0 if entry is None else int(inputs.counts.sum()) * inputs.x.shape[1])

    monkeypatch.setattr(BatchSums, "_add", add)
    monkeypatch.setattr(BatchSums, "add_runs", add_runs)
    model = load_model(make())
    with model.observing(Collector(model, options)):
        model.logits(np.arange(7))
    assert sum(added) == 7 * squared_numbers(model, options)
    assert squaring_seconds() > 0


def activations(model, tokens):
    """The inputs of each matrix: {(tensor, matrix): float64 [n, columns]}."""
    inputs = {}

    class Inputs(Observer):
        def wants_input(self, op):
            return isinstance(op, ops.Linear | ops.ExpertLinear | ops.LatentAttention)

        def on_input(self, op, weight, matrix, x):
            inputs.setdefault((weight.name, matrix), []).append(x.astype(np.float64))

    with model.observing(Inputs()):
        perplexity(model, tokens, n_ctx=128, chunks=4)
    return {key: np.concatenate(pieces) for key, pieces in inputs.items() if key[0] != "output.weight"}


def test_sums_of_squared_activations(demo, collected):
    """Compared with squares in float64, expert by expert."""
    for (name, matrix), x in activations(*demo).items():
        sums, counts = collected[0].entries[name]
        assert counts[matrix] == len(x)
        np.testing.assert_allclose(sums[matrix], (x**2).sum(axis=0), rtol=1e-5)


@pytest.mark.parametrize("threads", [1, 2])
def test_experts_of_a_quantised_file(demo, tmp_path, threads):
    """All experts of a layer run as one program there, and are observed together."""
    _, tokens = demo
    execute(plan_quantize(open_source(FOLDER / "demo"), tmp_path / "q8_0.gguf", type=TYPES["q8_0"], pure=True))
    model = load_model(tmp_path / "q8_0.gguf", threads=threads)
    entries = collect(model, tokens, n_ctx=128, chunks=4)[0].entries
    inputs = activations(model, tokens)
    experts = {key: x for key, x in inputs.items() if "_exps" in key[0]}
    assert len(experts) == 3 * 3 * 8
    for (name, matrix), x in experts.items():
        sums, counts = entries[name]
        assert counts[matrix] == len(x)
        np.testing.assert_allclose(sums[matrix], (x**2).sum(axis=0), rtol=1e-5)


def test_collecting_does_not_change_the_perplexity(demo, collected):
    model, tokens = demo
    alone = perplexity(model, tokens, n_ctx=128, chunks=4).perplexity
    assert collected[1].perplexity == pytest.approx(alone, rel=1e-4)  # latent attention sums in another order


def test_process_output_and_snapshots(demo, tmp_path):
    model, tokens = demo
    saved = []
    imatrix, _ = collect(
        model,
        tokens,
        n_ctx=128,
        chunks=3,
        options=CollectOptions(output=True),
        save_frequency=1,
        on_save=lambda i: saved.append(i.chunk_count),
    )
    assert saved == [1]  # the first window runs alone, the others fit into one pass
    assert imatrix.entries["output.weight"][1].tolist() == [3 * 63]  # only scored positions pass through the output
    imatrix.save(tmp_path / "a.imatrix")
    assert load(tmp_path / "a.imatrix").entries.keys() == imatrix.entries.keys()


def test_merged_halves_equal_one_collection(demo):
    model, tokens = demo
    ids = np.array(tokens[: 4 * 128])
    parts = [collect(model, part, n_ctx=128)[0] for part in (ids[:256], ids[256:])]
    expected = collect(model, ids, n_ctx=128)[0]
    merged = parts[0].merge(parts[1])
    assert merged.chunk_count == expected.chunk_count == 4
    for name, (sums, counts) in expected.entries.items():
        assert np.array_equal(merged.entries[name][1], counts)
        np.testing.assert_allclose(merged.entries[name][0], sums, rtol=1e-4, atol=1e-6)


def test_an_activation_that_is_not_finite_is_named(demo):
    collector = Collector(demo[0])
    op = next(op for op in demo[0].graph.ops if op.weights and op.weights[0].name == "blk.0.ffn_up.weight")
    with pytest.raises(MillError, match=r"the input of blk\.0\.ffn_up\.weight is not finite"):
        collector.on_input(op, op.weight, 0, np.full((2, 256), np.nan, np.float32))


@pytest.mark.parametrize("name", ["blk.2.attn_output.weight", "blk.1.ffn_down.weight"])
def test_the_first_damaged_weight_is_named(demo, name):
    source, tokens = open_source(FOLDER / "demo"), demo[1]
    name = name if name in source.tensors else name.replace(".weight", "_exps.weight")
    tensor = source.tensors[name]

    def read(start, stop):
        return np.full_like(tensor.read(start, stop), np.nan)

    damaged = replace(tensor, read=read, raw=None, stored=None)
    model = load_model(replace(source, tensors=source.tensors | {name: damaged}))
    with pytest.raises(MillError, match=rf"first output that is not finite .* is that of {name}.*\(window 1 of the text\)"):
        collect(model, tokens, n_ctx=64, chunks=3)
    assert model.observer is None
