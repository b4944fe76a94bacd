"""Vectors of texts, in OpenAI's and llama-server's forms, and the ranking of documents."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from ....formats import MillError, PlanError
from ...embedding import POOLINGS, embed_tokens, model_pooling, pair_tokens
from ..requests.checks import CONTEXT_EXCEEDED, JsonObject, RequestError, flag, invalid, number, text
from ..requests.field_limits import EMBEDDINGS, RERANK
from ..responses import as_request_error, json_response, result_while_connected
from ..service import Service

_MAX_TEXTS = 2048  # of a request
_MAX_WEIGHTS = 1 << 24  # numbers of the vectors of a request, where those of a full context are not more


def embedding_routes(service: Service) -> list[Route]:
    """The routes, for a served model."""

    def pooling_of(body: JsonObject) -> str:
        pooling = body.get("pooling") or model_pooling(service.model)
        if pooling not in POOLINGS:
            raise invalid("pooling", f"one of {', '.join(POOLINGS)}", pooling)
        return pooling

    def check_lengths(param: str, sequences: Sequence[list[int]]) -> None:
        most = min(service.model.n_ctx, service.model.graph.n_positions or service.model.n_ctx)
        for i, tokens in enumerate(sequences):
            if not 0 < len(tokens) <= most:
                message = f"{param}[{i}] has {len(tokens)} tokens; there have to be 1 to {most}"
                raise RequestError(message, param=param, code=CONTEXT_EXCEEDED)
        total = sum(map(len, sequences))
        if total > service.most_tokens:
            message = f"{param} has {total} tokens, and a request may have {service.most_tokens}"
            raise RequestError(message, param=param, code=CONTEXT_EXCEEDED)

    def check_vectors(n_vectors: int) -> None:
        most = max(_MAX_WEIGHTS // service.model.graph.n_embd, service.model.n_ctx)
        if n_vectors > most:
            message = f"{n_vectors} tokens have a vector each, and a request may have {most}: fewer texts, or another pooling"
            raise RequestError(message, param="pooling", code="invalid_value")

    async def vectors_of(
        request: Request, sequences: Sequence[list[int]], pooling: str, normalize: bool = True
    ) -> list[np.ndarray]:
        try:
            computing = service.engine.compute(embed_tokens(service.model, sequences, pooling, normalize=normalize))
            return await result_while_connected(request, computing)
        except MillError as error:
            raise as_request_error(error) from None

    async def sequences_of(body: JsonObject) -> list[list[int]]:
        param = "input" if "input" in body or "content" not in body else "content"
        value = body.get(param)
        single = isinstance(value, str) or (isinstance(value, list) and value and all(type(i) is int for i in value))
        values: list[Any] | Any = [value] if single else value
        if not isinstance(values, list) or not 0 < len(values) <= _MAX_TEXTS:
            raise invalid(param, f"a text, token ids, or a list of 1 to {_MAX_TEXTS} of them", value)
        for i, each in enumerate(values):
            if isinstance(each, str):
                service.check_length(each, param)
            elif not isinstance(each, list):
                raise invalid(f"{param}[{i}]", "a text or token ids", each)

        def encode() -> list[list[int]]:
            return [
                service.model.tokenizer.encode(each) if isinstance(each, str) else service.check_token_ids(param, each)
                for each in values
            ]

        sequences = await service.in_thread(encode, size=sum(map(len, values)))
        check_lengths(param, sequences)
        return sequences

    async def embeddings(request: Request) -> Response:
        body = await service.read(request, EMBEDDINGS, dict)
        form = body.get("encoding_format") or "float"
        if form not in ("float", "base64"):
            raise invalid("encoding_format", "float or base64", form)
        pooling = pooling_of(body)
        if pooling == "none":
            raise RequestError("the model makes a vector of every token: use /embedding", param="input", code="invalid_value")
        sequences = await sequences_of(body)
        vectors = await vectors_of(request, sequences, pooling)
        if body.get("dimensions") is not None:
            n = number(1, len(vectors[0]), integer=True)("dimensions", body["dimensions"])
            vectors = [vector[:n] / max(float(np.linalg.norm(vector[:n])), 1e-12) for vector in vectors]
        usage = {"prompt_tokens": sum(map(len, sequences)), "total_tokens": sum(map(len, sequences))}
        data = ({"object": "embedding", "index": i, "embedding": _written(v, form)} for i, v in enumerate(vectors))
        head = json.dumps({"object": "list", "model": service.name, "usage": usage})[:-1]
        return _streamed(f'{head}, "data": [', data, "]}")

    async def embedding(request: Request) -> Response:
        body = await service.read(request, EMBEDDINGS, dict)
        pooling = pooling_of(body)
        normalize = number(-1, 2, integer=True)("embd_normalize", body.get("embd_normalize", 2)) == 2 and pooling != "none"
        sequences = await sequences_of(body)
        if pooling == "none":
            check_vectors(sum(map(len, sequences)))
        vectors = await vectors_of(request, sequences, pooling, normalize)
        data = ({"index": i, "embedding": np.atleast_2d(v).tolist()} for i, v in enumerate(vectors))
        return _streamed("[", data, "]")

    async def rerank(request: Request) -> Response:
        body = await service.read(request, RERANK, dict)
        if model_pooling(service.model) != "rank":
            raise RequestError(
                "the model does not rank: it has no classifier", param="model", code="unsupported_parameter", status=501
            )
        query, documents = text("query", body.get("query")), body.get("documents")
        if not isinstance(documents, list) or not 0 < len(documents) <= _MAX_TEXTS:
            raise invalid("documents", f"a list of 1 to {_MAX_TEXTS} texts", documents)
        with_texts = flag("return_documents", body.get("return_documents") or False)
        top = number(1, 1 << 30, integer=True)("top_n", body.get("top_n") or len(documents))
        service.check_length(query, "query")
        texts = [
            text(f"documents[{i}]", each.get("text") if isinstance(each, dict) else each) for i, each in enumerate(documents)
        ]
        for each in texts:
            service.check_length(each, "documents")

        def encode() -> list[list[int]]:
            first = service.model.tokenizer.encode(query)  # once for all documents
            return [pair_tokens(service.model, first, each) for each in texts]

        try:
            sequences = await service.in_thread(encode, size=len(query) + sum(map(len, texts)))
        except PlanError as error:
            raise RequestError(str(error), param="model", code="unsupported_parameter") from None
        check_lengths("documents", sequences)
        scores = [float(vector[0]) for vector in await vectors_of(request, sequences, "rank")]
        results = [{"index": i, "relevance_score": score} for i, score in enumerate(scores)]
        if with_texts:
            results = [{**result, "document": documents[result["index"]]} for result in results]
        results.sort(key=lambda result: -result["relevance_score"])
        usage = {"prompt_tokens": sum(map(len, sequences)), "total_tokens": sum(map(len, sequences))}
        return json_response({"object": "list", "model": service.name, "results": results[:top], "usage": usage})

    post = ["POST"]
    return [
        Route("/v1/embeddings", embeddings, methods=post),
        Route("/embeddings", embedding, methods=post),
        Route("/embedding", embedding, methods=post),
        *(Route(path, rerank, methods=post) for path in ("/v1/rerank", "/v1/reranking", "/rerank", "/reranking")),
    ]


def _streamed(head: str, elements: Iterator[JsonObject], tail: str) -> Response:
    """A list as JSON that is made element by element, beside the event loop, while it is sent: all of it takes many times the
    memory of the vectors."""

    def parts() -> Iterator[bytes]:
        yield head.encode()
        for i, element in enumerate(elements):
            yield f"{', ' if i else ''}{json.dumps(element)}".encode()
        yield tail.encode()

    return StreamingResponse(parts(), media_type="application/json")


def _written(vector: np.ndarray, form: str) -> Any:
    if form == "base64":
        return base64.b64encode(vector.astype("<f4").tobytes()).decode()
    return vector.tolist()
