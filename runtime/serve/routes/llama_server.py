"""Routes of llama-server and vLLM that OpenAI's API lacks: the state of the server, and texts as tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from ....formats import PlanError
from ....version import __version__
from ...text.tokenizer import Tokenizer
from ..metrics import metrics_text
from ..replies.generation_settings import request_settings, shown_settings
from ..replies.llama_replies import LlamaReplies
from ..replies.openai_replies import Prompt
from ..requests.checks import CONTEXT_EXCEEDED, JsonObject, RequestError, flag, invalid, number, text
from ..requests.field_limits import CHAT, DETOKENIZE, INFILL, LLAMA_COMPLETION, TOKENIZE
from ..requests.fields import is_token_list, parse_chat, parse_completion
from ..responses import dump_in_pieces, json_response
from ..service import Service
from ..tool_calls.prompt_renderer import PromptRenderer

_INFILL_FIELDS = ("input_prefix", "input_suffix", "prompt")  # before, after, and the beginning of what is generated
# Fields of /completion that are read here, or make no difference: prompts are always cached.
_OWN_FIELDS = (
    "n_probs",
    "post_sampling_probs",
    "return_tokens",
    "response_fields",
    "cache_prompt",
    "timings_per_token",
    "return_progress",
)


def llama_server_routes(service: Service) -> list[Route]:
    """The routes, for a served model."""

    async def health(request: Request) -> Response:
        n_tasks, n_slots = service.engine.n_tasks, service.engine.n_slots
        n_busy = min(n_tasks, n_slots)
        counts = {"slots_processing": n_busy, "slots_idle": n_slots - n_busy, "waiting": n_tasks - n_busy}
        return json_response({"status": "ok", **counts})

    async def props(request: Request) -> Response:
        tokens, vocabulary = service.tokenizer.vocabulary.tokens, service.tokenizer.vocabulary
        plain, with_tools = (each if isinstance(each, PromptRenderer) else None for each in service.renderers)
        templates = {"chat_template": plain.template_text if plain is not None else ""}
        if with_tools is not None and with_tools.template_text != templates["chat_template"]:
            templates["chat_template_tool_use"] = with_tools.template_text
        return json_response(
            {
                "default_generation_settings": {"n_ctx": service.model.n_ctx, "params": shown_settings(service.defaults)},
                "total_slots": service.engine.n_slots,
                "model_alias": service.name,
                "model_path": service.description["file"],
                "model_ftype": service.description["types"][0]["type"].upper(),
                "modalities": {"vision": False, "video": False, "audio": False},
                "endpoint_slots": True,
                "endpoint_props": False,
                "endpoint_metrics": service.settings.metrics,
                **templates,
                "chat_template_caps": {"supports_tools": with_tools is not None and with_tools.supports_tools},
                "bos_token": tokens[vocabulary.bos] if vocabulary.bos is not None else "",
                "eos_token": tokens[vocabulary.eos] if vocabulary.eos is not None else "",
                "build_info": f"ggufmill {__version__}",
                "is_sleeping": False,
                "model": service.description,
            }
        )

    async def tokenize(request: Request) -> Response:
        body = await service.read(request, TOKENIZE, dict)
        name = "prompt" if "prompt" in body else "content"
        given = body.get(name)
        if not isinstance(given, str) and not is_token_list(given):
            raise RequestError(f"{name} has to be a text", param=name, code="invalid_value")
        special = bool(body.get("add_special_tokens", True) if name == "prompt" else body.get("add_special", False))
        parse = bool(body.get("parse_special", True))
        with_pieces = flag("with_pieces", body.get("with_pieces") or False)
        tokens = await service.encode_prompt(given, name, special, parse)
        if len(tokens) > service.most_tokens:
            raise RequestError(f"{name} has {len(tokens)} tokens, and may have {service.most_tokens}", name, CONTEXT_EXCEEDED)

        def reply() -> Response:
            if with_pieces:
                shown = {"tokens": [{"id": token, "piece": _piece(service.tokenizer, token)} for token in tokens]}
            else:
                lengths = {"count": len(tokens), "max_model_len": service.model.n_ctx} if name == "prompt" else {}
                shown = {"tokens": tokens, **lengths}
            return Response(dump_in_pieces(shown), media_type="application/json")

        return await service.in_thread(reply, size=len(tokens))

    async def detokenize(request: Request) -> Response:
        def parse(body: JsonObject) -> list[int]:
            tokens = body.get("tokens")
            if not isinstance(tokens, list):
                raise RequestError("tokens has to be a list of token ids", param="tokens", code="invalid_value")
            return service.check_token_ids("tokens", tokens)

        ids = await service.read(request, DETOKENIZE, parse)

        def reply() -> Response:
            text = service.tokenizer.decode(ids, False)
            return json_response({"content": text, "prompt": text})

        return await service.in_thread(reply, size=len(ids))

    async def tokenizer_info(request: Request) -> Response:
        tokens, vocabulary, renderer = service.tokenizer.vocabulary.tokens, service.tokenizer.vocabulary, service.renderers[0]
        special = {"bos": vocabulary.bos, "eos": vocabulary.eos, "unk": vocabulary.unknown}
        special["pad"] = vocabulary.special_id("padding")
        return json_response(
            {
                **{f"{name}_token": None if token is None else tokens[token] for name, token in special.items()},
                "add_bos_token": service.tokenizer.add_bos,
                "add_eos_token": service.tokenizer.add_eos,
                "model_max_length": service.model.n_ctx,
                "vocab_size": service.tokenizer.n_vocab,
                "chat_template": renderer.template_text if isinstance(renderer, PromptRenderer) else None,
            }
        )

    async def apply_template(request: Request) -> Response:
        parsed = await service.read(request, CHAT, lambda body: parse_chat(body, service.defaults))
        return await service.in_thread(lambda: json_response({"prompt": service.render(parsed)}), kind="template")

    async def completion(request: Request) -> Response:
        return await complete(request, await service.read(request, LLAMA_COMPLETION, dict))

    async def infill(request: Request) -> Response:
        body = await service.read(request, INFILL, dict)
        prefix, suffix, middle = (text(name, body.get(name) or "") for name in _INFILL_FIELDS)
        if body.get("input_extra"):
            message = "input_extra is not supported: texts of other files belong into input_prefix"
            raise RequestError(message, param="input_extra", code="unsupported_parameter")
        fields = {name: value for name, value in body.items() if name not in (*_INFILL_FIELDS, "input_extra")}
        ids = await service.encode_infill(prefix, suffix, "input_prefix", status=501)
        service.check_length(middle, "prompt")
        ids += await service.in_thread(service.tokenizer.encode, middle, False, True, size=len(middle))
        return await complete(request, {**fields, "prompt": ids})

    async def complete(request: Request, body: dict[str, Any]) -> Response:
        n_probs = number(0, 20, integer=True)("n_probs", body.get("n_probs") or 0)
        with_tokens = flag("return_tokens", body.get("return_tokens") or False)
        post_sampling = flag("post_sampling_probs", body.get("post_sampling_probs") or False)
        given = body.get("prompt")
        as_list = isinstance(given, list) and not is_token_list(given)
        shown = body.get("response_fields") or []
        if not isinstance(shown, list) or not all(isinstance(path, str) for path in shown):
            raise invalid("response_fields", 'a list of texts like "timings/prompt_n"', shown)
        only_prompt = type(body.get("n_predict")) is int and body["n_predict"] == 0
        fields = {name: value for name, value in body.items() if name not in _OWN_FIELDS}
        fields |= {"logprobs": None} | ({"n_predict": None} if only_prompt else {})
        parsed = await service.in_thread(parse_completion, fields, service.defaults)
        if only_prompt:  # is read, and stays in the cache
            parsed.options["n_predict"] = 0
        if n_probs or with_tokens or parsed.stream:
            parsed.options |= {"n_probs": n_probs, "post_sampling": post_sampling}
        await service.prepare_options(parsed)
        grammar = str(parsed.grammar_fields.get("grammar", ""))
        settings = request_settings(parsed.options, grammar, stream=parsed.stream, n_probs=n_probs)

        def build(prompts: Sequence[Prompt]) -> LlamaReplies:
            return LlamaReplies(
                service.tokenizer,
                service.name,
                prompts,
                settings,
                n_probs=n_probs,
                post_sampling=post_sampling,
                with_tokens=with_tokens,
                as_list=as_list,
                shown=shown,
            )

        if parsed.n > 1 or parsed.best_of > 1 or parsed.echo or parsed.include_usage:
            raise RequestError("n, best_of, echo and stream_options belong to /v1/completions", param="n", code="invalid_value")
        prompts = await service.encode_prompts(parsed)

        def with_special_tokens() -> list[Prompt]:
            return [replace(each, text=service.tokenizer.decode(each.ids, False)) for each in prompts]

        n_tokens = sum(len(each.ids) for each in prompts)
        shown_prompts = await service.in_thread(with_special_tokens, size=n_tokens)
        return await service.answer(request, parsed, shown_prompts, build=build)

    async def metrics(request: Request) -> Response:
        if not service.settings.metrics:
            raise RequestError("there are no metrics: the server was started without --metrics", status=501)
        try:
            text, media_type = metrics_text(service.engine)
        except PlanError as error:
            raise RequestError(str(error), status=501) from None
        return Response(text, media_type=media_type)

    async def adapters(request: Request) -> Response:
        return json_response([])  # they are merged into files, not loaded with them

    return [
        Route("/completion", completion, methods=["POST"]),
        Route("/completions", completion, methods=["POST"]),
        Route("/infill", infill, methods=["POST"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/health", health, methods=["GET"]),
        Route("/v1/health", health, methods=["GET"]),
        Route("/props", props, methods=["GET"]),
        Route("/lora-adapters", adapters, methods=["GET"]),
        Route("/tokenizer_info", tokenizer_info, methods=["GET"]),
        Route("/tokenize", tokenize, methods=["POST"]),
        Route("/detokenize", detokenize, methods=["POST"]),
        Route("/apply-template", apply_template, methods=["POST"]),
    ]


def _piece(tokenizer: Tokenizer, token: int) -> str | list[int]:
    """The text of a token; its bytes where they are no whole characters."""
    piece = tokenizer.piece(token)
    try:
        return piece.decode("utf-8")
    except UnicodeDecodeError:
        return list(piece)
