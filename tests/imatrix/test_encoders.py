"""Importance matrices of models that predict no tokens: an entry for every matrix, the sums of transformers' inputs."""

import math

import numpy as np
import pytest
from encoder_cases import convert_encoder

from ggufmill import compute_imatrix
from ggufmill.imatrix.collect import collect
from ggufmill.quantize.recipes.type_selection import is_quantizable
from ggufmill.runtime import load_model
from ggufmill.runtime.graph.ops import Linear

N_CTX = 32


@pytest.mark.parametrize("case", ["bert", "nomic-bert", "jina-bert-v3", "modern-bert", "gemma-embedding", "qwen3-embedding"])
def test_every_matrix_has_an_entry(tmp_path, case):
    *_, path = convert_encoder(case, tmp_path)
    model = load_model(path, exact=True)
    tokens = np.random.default_rng(1).integers(3, 288, 3 * N_CTX)
    imatrix, figures = collect(model, tokens, n_ctx=N_CTX)
    matrices = {name for name, tensor in model.source.tensors.items() if is_quantizable(tensor) and name.startswith("blk.")}
    assert set(imatrix.entries) == matrices
    assert (imatrix.chunk_count, figures.chunks) == (3, 3)
    assert math.isnan(figures.perplexity)
    # The input of the first matrix, by the model's own values.
    first = next(op for op in model.graph.ops if isinstance(op, Linear))
    seen = []

    class Inputs:
        wants_squares = False

        def wants_input(self, op):
            return op is first

        def wants_output(self, op):
            return False

        def on_input(self, op, weight, matrix, x):
            seen.append(x.copy())

    model.observer = Inputs()
    windows = tokens.reshape(3, N_CTX).copy()
    if model.tokenizer.add_bos:
        windows[:, 0] = model.tokenizer.bos
    for window in windows:
        model.hidden([(model.new_cache(N_CTX), window)])
    sums, counts = imatrix.entries[first.weight.name]
    assert counts.tolist() == [3 * N_CTX]
    assert np.allclose(sums[0], np.square(np.concatenate(seen), dtype=np.float64).sum(axis=0), rtol=1e-5)


def test_a_text_gives_a_file(tmp_path):
    *_, path = convert_encoder("bert", tmp_path)
    text = tmp_path / "text.txt"
    text.write_text("what goes into every matrix of a model " * 20, "utf-8")
    result = compute_imatrix(path, text, tmp_path / "bert.imatrix", n_ctx=N_CTX, chunks=4)
    assert (tmp_path / "bert.imatrix").exists()
    assert result.as_json()["chunks"] == 4
