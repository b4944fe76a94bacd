"""Models that only make vectors, served: their vectors, refusals of what they cannot do, and clients that leave."""

import dataclasses
import threading
import time

import numpy as np
import pytest
from checkpoint_cases import oracle, randomise, save_tokenizer, write_gguf
from encoder_cases import CASES, COMMON, convert_encoder

from ggufmill.convert import open_source
from ggufmill.runtime import load_model
from ggufmill.runtime.embedding import embed_tokens

pytest.importorskip("starlette")
pytest.importorskip("openai")
import httpx
import openai

from ggufmill.runtime.serve.engine import Engine

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 5}
TEMPLATE = {"tokenizer.chat_template": "{{ messages[0].content }}"}


def encoder(tiny, **metadata):
    """The tiny model without its output matrix."""
    keys = {f"llama.{name.replace('__', '.')}": value for name, value in metadata.items()}
    return load_model(dataclasses.replace(tiny, metadata=tiny.metadata | {"general.name": "vec"} | keys), n_ctx=64)


@pytest.fixture(scope="module")
def url(served, tiny):
    """With a warm-up, which has to be one that such a model can do."""
    return served(encoder(tiny, pooling_type=1, attention__causal=False), warm_up=True)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT),
        ("/v1/chat/completions", CHAT | {"stream": True}),
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        ("/v1/messages", CHAT),
        ("/completion", {"prompt": "a"}),
        ("/infill", {"input_prefix": "a"}),
    ],
)
def test_answers_are_refused_in_a_line_that_says_why(url, path, body):
    reply = httpx.post(url + path, json=body, timeout=300)
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, "model")
    assert error["message"] == "vec (llama) makes vectors of texts, not answers: use /v1/embeddings"


def test_a_template_and_causal_attention_change_nothing(served, tiny):
    """As of Qwen 3 Embedding, whose files have a template and whose tokens see earlier ones only."""
    model = encoder(tiny, pooling_type=3)
    model.metadata.update(TEMPLATE)
    url = served(model, warm_up=True)
    reply = httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
    (expected,) = embed_tokens(model, [model.tokenizer.encode("abc")], "last")
    (reply,) = openai.OpenAI(base_url=f"{url}/v1", api_key="x").embeddings.create(model="x", input="abc").data
    np.testing.assert_allclose(reply.embedding, expected, rtol=1e-6)
    assert httpx.get(f"{url}/slots", timeout=300).json()[0]["is_processing"] is False
    assert httpx.post(f"{url}/slots/0?action=erase", timeout=300).status_code == 400


@pytest.mark.parametrize("case", ["bert", "nomic-bert", "modern-bert", "qwen3-embedding"])
def test_vectors_are_those_of_transformers(served, tmp_path, case):
    tokens, expected, _, path = convert_encoder(case, tmp_path)
    pooled = {"cls": expected[0], "mean": expected.mean(0), "last": expected[-1]}[CASES[case][2]]
    pooled /= np.linalg.norm(pooled)
    url = served(load_model(path), warm_up=False)
    reply = openai.OpenAI(base_url=f"{url}/v1", api_key="x").embeddings.create(model="x", input=tokens.tolist())
    assert np.abs(np.array(reply.data[0].embedding) - pooled).max() < 2e-3  # matrices of the file are in half precision
    (answer,) = httpx.post(f"{url}/embedding", json={"content": tokens.tolist()}, timeout=300).json()
    np.testing.assert_allclose(answer["embedding"][0], reply.data[0].embedding, rtol=1e-6)


def test_documents_are_ranked_as_transformers_does(served, tmp_path):
    torch, transformers = oracle()
    config = transformers.XLMRobertaConfig(**(COMMON | {"type_vocab_size": 1, "num_labels": 1}), attn_implementation="eager")
    reference = randomise(transformers.XLMRobertaForSequenceClassification(config))
    reference.save_pretrained(tmp_path)
    save_tokenizer(tmp_path / "tokenizer.json")
    model = load_model(write_gguf(open_source(tmp_path), tmp_path / "rank.gguf")[0], exact=True)
    documents, query = ["its document", "another one", "a third"], "a query"
    encode, eos = model.tokenizer.encode, model.tokenizer.eos
    with torch.no_grad():
        expected = [float(reference(torch.tensor([[*encode(query), eos, *encode(each)]])).logits[0, 0]) for each in documents]
    url = served(model, warm_up=False)
    for path in ("/v1/rerank", "/rerank"):
        ask = {"query": query, "documents": documents, "return_documents": True}
        results = httpx.post(url + path, json=ask, timeout=300).json()["results"]
        assert [each["index"] for each in results] == np.argsort(-np.array(expected)).tolist()
        for each in results:
            assert each["relevance_score"] == pytest.approx(expected[each["index"]], abs=1e-4)
            assert each["document"] == documents[each["index"]]
    (first,) = httpx.post(f"{url}/v1/rerank", json=ask | {"top_n": 1}, timeout=300).json()["results"]
    assert first == results[0]
    reply = httpx.post(f"{url}/v1/rerank", json=ask | {"documents": "x"}, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "documents")


def test_a_computation_ends_when_its_client_leaves(served, tiny, monkeypatch):
    """After the sequence under way."""
    n_done, left = 0, threading.Event()

    def slowly(model, sequences, pooling, **options):
        nonlocal n_done
        for tokens in sequences:
            yield next(embed_tokens(model, [tokens], pooling, **options))
            n_done += 1
            time.sleep(0.01)
        left.set()

    monkeypatch.setattr("ggufmill.runtime.serve.routes.embeddings.embed_tokens", slowly)
    url = served(encoder(tiny, pooling_type=1), warm_up=False)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{url}/v1/embeddings", json={"input": ["a"] * 1000}, timeout=httpx.Timeout(300, read=0.3))
    reply = httpx.post(f"{url}/v1/embeddings", json={"input": "a"}, timeout=300)  # the engine goes on
    assert reply.status_code == 200
    n = n_done
    time.sleep(0.1)
    assert n_done == n < 1000


def test_a_cancelled_computation_frees_its_place(tiny):
    engine = Engine(encoder(tiny, pooling_type=1), max_queue=0)
    try:
        endless = engine.compute(iter(int, 1))
        endless.cancel()
        while engine._n_computations:
            time.sleep(0.001)
        assert engine.compute(iter([1, 2])).result(120) == [1, 2]
    finally:
        engine.close()
