"""Embeddings of a running server, with OpenAI's Python client."""

import base64

import numpy as np
import pytest

from ggufmill.runtime import load_model
from ggufmill.runtime.embedding import embed_tokens

openai = pytest.importorskip("openai")
httpx = pytest.importorskip("httpx")

TEXTS = ["one", "another text", "one"]


@pytest.fixture(scope="module")
def model(tiny):
    return load_model(tiny, n_ctx=64)


@pytest.fixture(scope="module")
def url(served, model):
    return served(model, warm_up=False)


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=300)


@pytest.fixture(scope="module")
def expected(model):
    return np.stack(list(embed_tokens(model, [model.tokenizer.encode(text) for text in TEXTS], "last")))


def test_vectors_are_those_of_the_library(client, model, expected):
    for form in ("float", "base64", openai.NOT_GIVEN):  # the client itself asks for base64, and decodes it
        reply = client.embeddings.create(model="x", input=TEXTS, encoding_format=form)
        vectors = [each.embedding for each in reply.data]
        if form == "base64":
            vectors = [np.frombuffer(base64.b64decode(each), np.float32) for each in vectors]
        np.testing.assert_allclose(vectors, expected, rtol=1e-6)
    assert reply.usage.prompt_tokens == sum(len(model.tokenizer.encode(text)) for text in TEXTS)
    one = client.embeddings.create(model="x", input=TEXTS[1])
    np.testing.assert_allclose(one.data[0].embedding, expected[1], rtol=1e-6)
    ids = client.embeddings.create(model="x", input=[model.tokenizer.encode(text) for text in TEXTS])
    np.testing.assert_allclose(ids.data[2].embedding, expected[2], rtol=1e-6)


def test_fewer_dimensions(client, expected):
    vector = np.array(client.embeddings.create(model="x", input=TEXTS[0], dimensions=8).data[0].embedding)
    np.testing.assert_allclose(vector, expected[0][:8] / np.linalg.norm(expected[0][:8]), rtol=1e-5)


def test_llama_server_s_forms(url, model, expected):
    for path in ("/embedding", "/embeddings"):
        replies = httpx.post(url + path, json={"content": TEXTS}, timeout=300).json()
        np.testing.assert_allclose([reply["embedding"][0] for reply in replies], expected, rtol=1e-6)
    (reply,) = httpx.post(f"{url}/embedding", json={"content": TEXTS[0], "pooling": "none"}, timeout=300).json()
    assert len(reply["embedding"]) == len(model.tokenizer.encode(TEXTS[0]))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": 5}, "input"),
        ({"input": [[5000]]}, "input"),
        ({"input": ["x" * 200]}, "input"),
        ({"input": ["x", None]}, "input[1]"),
        ({"input": "x", "dimensions": 5000}, "dimensions"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format"),
        ({"input": "x", "pooling": "best"}, "pooling"),
    ],
)
def test_refusals_name_the_field(url, fields, param):
    reply = httpx.post(f"{url}/v1/embeddings", json=fields, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)


def test_vectors_of_every_token_have_a_limit(url, monkeypatch):
    monkeypatch.setattr("ggufmill.runtime.serve.routes.embeddings._MAX_WEIGHTS", 32 * 64)  # of 64 tokens
    texts = {"content": ["x" * 20] * 3, "pooling": "none"}
    assert httpx.post(f"{url}/embedding", json=texts, timeout=300).status_code == 200
    reply = httpx.post(f"{url}/embedding", json={**texts, "content": ["x" * 20] * 4}, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "pooling")
    assert httpx.post(f"{url}/embedding", json={"content": ["x" * 20] * 40}, timeout=300).status_code == 200


def test_a_model_that_does_not_rank(url):
    reply = httpx.post(f"{url}/v1/rerank", json={"query": "a", "documents": ["b"]}, timeout=300)
    assert (reply.status_code, reply.json()["error"]["param"]) == (501, "model")
