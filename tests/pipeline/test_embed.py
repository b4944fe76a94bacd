"""Embeddings of texts: poolings, dense layers, classifiers, against transformers' outputs and torch's arithmetic."""

import json

import numpy as np
import pytest
from checkpoint_cases import oracle, randomise, save_tokenizer, write_gguf
from encoder_cases import COMMON, convert_encoder

from ggufmill import embed_texts
from ggufmill.convert import open_source
from ggufmill.errors import PlanError, UsageError
from ggufmill.runtime import load_model
from ggufmill.runtime.embedding import embed_tokens, model_pooling

TOLERANCE = 1e-5


def unit(vector):
    return vector / np.linalg.norm(vector)


@pytest.mark.parametrize("case", ["bert", "nomic-bert", "qwen3-embedding", "gemma-embedding-dense"])
def test_outputs_are_pooled(tmp_path, case):
    tokens, outputs, dense, path = convert_encoder(case, tmp_path)
    model = load_model(path, exact=True)
    own = {"bert": "cls", "nomic-bert": "mean", "qwen3-embedding": "last", "gemma-embedding-dense": "mean"}[case]
    assert model_pooling(model) == own
    for pooling, expected in (("mean", outputs.mean(0)), ("cls", outputs[0]), ("last", outputs[-1])):
        for matrix in dense:
            expected = matrix @ expected
        (plain,) = embed_tokens(model, [tokens], pooling, normalize=False)
        assert np.abs(plain - expected).max() < 1e-4
        several = list(embed_tokens(model, [tokens, tokens[:5], tokens], pooling))
        assert np.abs(several[2] - unit(expected)).max() < TOLERANCE
    (each,) = embed_tokens(model, [tokens], "none", normalize=False)
    assert np.abs(each - outputs).max() < 1e-4


def test_texts(tmp_path):
    *_, path = convert_encoder("bert", tmp_path)
    lines = tmp_path / "texts.txt"
    lines.write_text("the first\n\n  \nthe second\n", "utf-8")
    result = embed_texts(path, "words", file=lines, exact=True)
    assert result.texts == ["words", "the first", "the second"]
    assert result.tokens == [5, 9, 10]
    assert result.pooling == "cls"
    assert np.allclose([np.linalg.norm(vector) for vector in result.vectors], 1, atol=1e-6)
    expected = [[float(a @ b) for b in result.vectors] for a in result.vectors]
    assert np.allclose(result.similarities, expected, atol=1e-6)
    values = json.loads(json.dumps(result.as_json()))
    assert values["embeddings"][1]["text"] == "the first"
    assert np.allclose(values["similarities"], expected, atol=1e-6)
    with pytest.raises(UsageError, match="there is no text"):
        embed_texts(path)
    with pytest.raises(PlanError, match="text 2 has 200 tokens, more than the context of 128"):
        embed_texts(path, ["a", "a" * 200])
    with pytest.raises(PlanError, match="by token types, which are not supported"):
        embed_texts(path, "a\tb", pooling="rank")
    *_, other = convert_encoder("roberta", tmp_path / "roberta")
    with pytest.raises(PlanError, match="no classifier"):
        embed_texts(other, "a\tb", pooling="rank")


def test_a_classifier_ranks(tmp_path):
    torch, transformers = oracle()
    config = transformers.XLMRobertaConfig(**(COMMON | {"type_vocab_size": 1, "num_labels": 1}), attn_implementation="eager")
    reference = randomise(transformers.XLMRobertaForSequenceClassification(config))
    reference.save_pretrained(tmp_path)
    save_tokenizer(tmp_path / "tokenizer.json")
    path, _ = write_gguf(open_source(tmp_path), tmp_path / "rank.gguf")
    model = load_model(path, exact=True)
    assert model_pooling(model) == "rank"
    result = embed_texts(model, ["a query\tits document", "a query\tanother one"])
    assert result.similarities is None
    for text, score in zip(result.texts, result.vectors, strict=True):
        first, second = (model.tokenizer.encode(part) for part in text.split("\t"))
        with torch.no_grad():
            expected = reference(torch.tensor([[*first, model.tokenizer.eos, *second]])).logits[0].numpy()
        assert np.abs(score - expected).max() < 1e-4
    with pytest.raises(PlanError, match="text 1 has no tab"):
        embed_texts(model, "a query")
