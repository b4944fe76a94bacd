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
from ggufmill.runtime.embedding import embed_tokens, model_pooling, pair_tokens

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
    with pytest.raises(PlanError, match="no separator that ends the first text"):
        embed_texts(path, "a\tb", pooling="rank")
    *_, other = convert_encoder("roberta", tmp_path / "roberta")
    with pytest.raises(PlanError, match="no classifier"):
        embed_texts(other, "a\tb", pooling="rank")


def test_a_bert_ranks_pairs_by_token_types(tmp_path):
    """As cross-encoders do: [CLS] query [SEP] document [SEP], and what is behind the first [SEP] is of type 1."""
    torch, transformers = oracle()
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefgh", *(f"##{c}" for c in "abcdefgh")]
    (tmp_path / "vocab.txt").write_text("".join(f"{word}\n" for word in words))
    config = COMMON | {"vocab_size": len(words), "type_vocab_size": 2, "num_labels": 1, "pad_token_id": 0}
    config |= {"bos_token_id": None, "eos_token_id": None}
    reference = randomise(
        transformers.BertForSequenceClassification(transformers.BertConfig(**config, attn_implementation="eager"))
    )
    reference.save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "BertTokenizer"}')
    path, _ = write_gguf(open_source(tmp_path), tmp_path / "rank.gguf")
    model = load_model(path, exact=True)
    assert model_pooling(model) == "rank"
    theirs = transformers.BertTokenizerFast(str(tmp_path / "vocab.txt"))
    pairs = [("abc d", "efg"), ("a", "bcdefg h"), ("abc d", "a")]
    result = embed_texts(model, ["\t".join(pair) for pair in pairs])  # three in one pass
    for (query, document), score in zip(pairs, result.vectors, strict=True):
        inputs = theirs(query, document, return_tensors="pt")
        assert pair_tokens(model, model.tokenizer.encode(query), document) == inputs["input_ids"][0].tolist()
        with torch.no_grad():
            expected = reference(**inputs).logits[0].numpy()
            untyped = reference(**{**inputs, "token_type_ids": 0 * inputs["token_type_ids"]}).logits[0].numpy()
        assert np.abs(score - expected).max() < 1e-4 < np.abs(untyped - expected).max()


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
