"""What all routes share: the model, its engine, reading and checking requests, and the answers to prompts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, cast

from starlette.requests import Request
from starlette.responses import Response

from ...formats import PlanError
from ..generation.repetition import find_breakers
from ..generation.sampling import token_biases
from ..generation.sampling_options import DEFAULT_BREAKERS
from ..model import Model
from ..text.chat import ChatTemplate, prompt_tokens
from ..text.infill import infill_prompt
from .answer_grammar import answer_grammar
from .engine import Engine
from .model_info import describe
from .replies.blocks import BlockResponse, BlockWriter
from .replies.openai_replies import Prompt, ReplyBuilder
from .requests.checks import CONTEXT_EXCEEDED, JsonObject, RequestError
from .requests.field_limits import Limits
from .requests.fields import CompletionRequest
from .requests.json_body import check_fields, load_body
from .requests.request_body import READ, ReadBody, read_bytes
from .responses import Replies, TaskResponse
from .server_settings import ServerSettings
from .tool_calls.prompt_renderer import PromptRenderer
from .tool_calls.stream_parser import StreamParser
from .tool_calls.tool_formats import find_reasoning_format, find_tool_format, special_tokens_in_tags
from .work_threads import SHORT, WorkThreads

MAX_PROMPT_TOKENS = 1 << 18  # of all prompts of a request, where the context is not longer
_MAX_LOGPROBS = 1 << 20  # of all choices of a request, where a full context does not have more
T = TypeVar("T")
_HEADER_SAFE_NAME = re.compile(r"[A-Za-z0-9_.-]{1,40}")


class Service:
    """A served model: its engine, and what its routes have in common."""

    def __init__(
        self,
        model: Model,
        engine: Engine,
        templates: tuple[ChatTemplate | PlanError, ChatTemplate | PlanError],
        name: str,
        defaults: Mapping[str, Any],
        settings: ServerSettings,
        threads: WorkThreads,
    ):
        """templates: for conversations without tools, and with tools; threads: of the server; other arguments as of
        `make_app`."""
        self.model, self.engine, self.name = model, engine, name
        self.renderers = [PromptRenderer(t) if isinstance(t, ChatTemplate) else t for t in templates]
        self.defaults, self.settings = defaults, settings
        self.in_thread = threads.run
        self.most_tokens = max(MAX_PROMPT_TOKENS, model.n_ctx)  # of all prompts of a request
        self.tokenizer = model.tokenizer
        self.description, self.created = describe(model), int(time.time())

    async def read(self, request: Request, limits: Limits, parse: Callable[[JsonObject], T]) -> T:
        """What a function makes of the JSON object in the body of a request. limits: of the fields that it reads; it gets no
        others. Raises RequestError when the body or a field is too large, or it is not a JSON object, and what `parse` raises.
        """
        read: ReadBody | None = request.scope.pop(READ, None)
        data, loaded = read or ReadBody(await read_bytes(request, self.settings.max_body, self.settings.body_seconds))

        def parsed() -> T:
            body = load_body(data, self.most_tokens) if loaded is None else loaded
            return parse(check_fields(body, limits, self.most_tokens))

        return parsed() if len(data) <= SHORT else await self.in_thread(parsed, kind="json")

    async def encode_chat(self, parsed: CompletionRequest) -> tuple[list[int], StreamParser]:
        """The prompt of a chat request, and the parser for its answer. Raises RequestError."""
        self.check_head()
        text = await self.in_thread(self.render, parsed, kind="template")
        self.check_length(text, "messages")
        parser = self.stream_parser(parsed, text)
        await self.prepare_options(parsed, parser)
        return await self.in_thread(prompt_tokens, self.tokenizer, text, size=len(text)), parser

    async def prepare_options(self, parsed: CompletionRequest, parser: StreamParser | None = None) -> None:
        """Sets the option `grammar` for what a request says of the form of its answer, and finds the tokens of the texts in
        its other options, which the engine so need not do. Raises RequestError."""
        parts = (parser.tool_format, parser.reasoning_end) if parser is not None else ()
        grammar = None
        if parsed.grammar_fields or parsed.tools:
            grammar = await self.in_thread(answer_grammar, parsed, self.tokenizer, *parts, kind="vocabulary")
        if grammar is not None:
            parsed.options["grammar"] = grammar
        if parsed.options.get("dry_multiplier") and (texts := parsed.options.get("dry_sequence_breakers", DEFAULT_BREAKERS)):
            parsed.options["breakers"] = await self.in_thread(find_breakers, self.tokenizer, texts, kind="vocabulary")
        if parsed.options.get("logit_bias"):
            try:
                biases = await self.in_thread(token_biases, self.tokenizer, parsed.options["logit_bias"])
                parsed.options["logit_bias"] = biases
            except PlanError as error:
                raise RequestError(str(error), param="logit_bias", code="invalid_value") from None

    async def encode_prompt(
        self, prompt: str | list[int | str], param: str = "prompt", special: bool = True, parse_special: bool = True
    ) -> list[int]:
        """The tokens of a text, or checked token ids with texts among them, as `encode` makes them. Raises RequestError.

        special: BOS and EOS as the vocabulary wants them, for a text and for a list that begins with one; parse_special: texts
        may name control tokens
        """
        parts = [prompt] if isinstance(prompt, str) else prompt
        texts = [each for each in parts if isinstance(each, str)]
        if texts:
            self.check_length("".join(texts), param)

        def encode() -> list[int]:
            self.check_token_ids(param, [each for each in parts if isinstance(each, int)])
            if not texts:
                return cast(list[int], parts)
            ids: list[int] = []
            for i, part in enumerate(parts):
                ids += self.tokenizer.encode(part, special and i == 0, parse_special) if isinstance(part, str) else [part]
            return ids

        return await self.in_thread(encode, size=len(parts) + sum(map(len, texts)))

    async def encode_prompts(self, parsed: CompletionRequest) -> list[Prompt]:
        """The prompts of a completion. Raises RequestError."""
        self.check_head()
        prompts, given = [], parsed.prompts or []
        after: list[int] | None = None
        if parsed.suffix is not None:  # once for all prompts
            self.check_length(parsed.suffix, "suffix")
            after = await self.in_thread(self.tokenizer.encode, parsed.suffix, False, size=len(parsed.suffix))
        for i, each in enumerate(given):
            param = "prompt" if len(given) == 1 else f"prompt[{i}]"
            if after is None:
                ids = await self.encode_prompt(each, param)
            else:
                ids = await self.encode_infill(each, after, param)
            if isinstance(each, str):
                prompts.append(Prompt(ids, each, self.tokenizer.add_bos))
            else:
                text = await self.in_thread(self.tokenizer.decode, ids, False, size=len(ids)) if parsed.echo else ""
                prompts.append(Prompt(ids, text))
        return prompts

    async def encode_infill(
        self, prefix: str | list[int | str], suffix: str | list[int], param: str, status: int = 400
    ) -> list[int]:
        """The prompt for the text between two others; suffix: tokens, or a text that is encoded for this prompt. Raises
        RequestError, with this status where the vocabulary has no tokens for it."""
        self.check_head()
        for text, name in ((suffix, "suffix"), (prefix, param)):
            if isinstance(text, str):
                self.check_length(text, name)
        is_text = isinstance(prefix, str)
        before = prefix if is_text else await self.encode_prompt(prefix, param, special=False, parse_special=False)
        try:
            return await self.in_thread(infill_prompt, self.tokenizer, before, suffix, size=len(before) + len(suffix))
        except PlanError as error:
            raise RequestError(str(error), param="suffix", code="unsupported_parameter", status=status) from None

    def check_head(self) -> None:
        """Raises RequestError where the model predicts no tokens."""
        if not self.model.has_head:
            message = f"{self.name} ({self.model.graph.architecture}) makes vectors of texts, not answers: use /v1/embeddings"
            raise RequestError(message, param="model", code="unsupported_parameter")

    def check_length(self, text: str, param: str) -> None:
        """Raises RequestError for a text that cannot fit into the context, before it is encoded; where it cannot be known that
        it does not fit, for one that is longer than any of so many tokens usually is."""
        n_ctx, n_bytes = self.model.n_ctx, len(text.encode("utf-8", "replace"))
        least = self.tokenizer.least_tokens(n_bytes)
        if n_bytes <= self.tokenizer.most_bytes(n_ctx - 1):
            return
        if least >= n_ctx:
            message = f"the prompt has at least {least} tokens, and the context holds {n_ctx} with the answer"
        else:
            most = self.tokenizer.most_bytes(n_ctx - 1)
            message = f"the prompt has {n_bytes} bytes, and up to {most} are read for a context of {n_ctx} tokens"
        raise RequestError(message, param, CONTEXT_EXCEEDED, n_prompt_tokens=least, n_ctx=n_ctx)

    def renderer(self, parsed: CompletionRequest) -> PromptRenderer:
        """Raises RequestError when there is no template, or the request has tools and the template does not support them."""
        renderer = self.renderers[bool(parsed.tools)]
        if isinstance(renderer, PlanError):
            raise RequestError(str(renderer), code="no_chat_template")
        if parsed.tools and not renderer.supports_tools:
            message = "the model's chat template has no place for functions (--template chooses another)"
            raise RequestError(message, param="tools", code="unsupported_parameter")
        return renderer

    def render(self, parsed: CompletionRequest) -> str:
        """The prompt text of a chat request, which continues a last message of the assistant's. Raises RequestError."""
        renderer, tools = self.renderer(parsed), {"tools": parsed.tools} if parsed.tools else {}
        messages, begun = parsed.messages or [], ""
        if len(messages) > 1 and messages[-1]["role"] == "assistant" and not messages[-1].get("tool_calls"):
            begun = messages[-1]["content"]
            messages = messages[:-1] if begun else messages
        try:
            return renderer.render(messages, {**parsed.variables, **tools}) + begun
        except PlanError as error:
            raise RequestError(str(error), param="messages", code="template_error") from None

    def stream_parser(self, parsed: CompletionRequest, prompt: str) -> StreamParser:
        """The parser for the answer to a rendered prompt. Sets the option `visible_special`: control tokens that are part of
        the tags that the parser looks for."""
        template = self.renderer(parsed).template_text
        reasoning = find_reasoning_format(template) if parsed.separate_reasoning else None
        tools = find_tool_format(template) if parsed.tools else None
        tags = [tag for format in (reasoning, tools) if format is not None for tag in format.tags]
        vocabulary = self.tokenizer.vocabulary
        special_tokens = ((text, id) for text, id, _ in vocabulary.special_tokens if vocabulary.is_control(id))
        parsed.options["visible_special"] = special_tokens_in_tags(tags, special_tokens) if tags else ()
        functions = {tool["function"]["name"]: tool["function"].get("parameters") for tool in parsed.tools}
        in_reasoning = reasoning is not None and prompt.rstrip().endswith(reasoning.start_tag)
        return StreamParser(reasoning, tools, functions, in_reasoning)

    def check_token_ids(self, name: str, tokens: list[Any]) -> list[int]:
        n = len(self.tokenizer.vocabulary.tokens)
        if not all(isinstance(i, int) and not isinstance(i, bool) and 0 <= i < n for i in tokens):
            raise RequestError(f"{name} has to hold token ids from 0 to {n - 1}", param=name, code="invalid_value")
        return tokens

    async def answer_in_blocks(
        self, request: Request, parsed: CompletionRequest, ids: list[int], parser: StreamParser, writer: BlockWriter
    ) -> Response:
        """Generates the response to a chat of an API whose answers are written in blocks. Raises RequestError."""
        if parsed.n > 1:
            raise RequestError("n has to be 1: there is one answer", param="n", code="invalid_value")
        self._check_prompts(parsed, [Prompt(ids)], "messages")
        tasks = TaskResponse(self.engine, [(ids, parsed.options)], request)
        response = BlockResponse(tasks, parser, writer, _ignored_fields(parsed))
        return response.stream() if parsed.stream else await response.complete()

    async def answer(
        self,
        request: Request,
        parsed: CompletionRequest,
        prompts: Sequence[Prompt],
        parser: StreamParser | None = None,
        build: Callable[[Sequence[Prompt]], Replies] | None = None,
    ) -> Response:
        """Generates the response to prompts. parser: for chats, None for completions; build: makes what builds the reply, None:
        in OpenAI's form. Raises RequestError."""
        options, logprobs = parsed.options, "n_probs" in parsed.options
        self._check_prompts(parsed, prompts, "prompt" if parser is None else "messages")
        if parsed.best_of > parsed.n:
            options.setdefault("n_probs", 0)
        tasks = []
        for prompt in prompts:
            for i in range(max(parsed.n, parsed.best_of)):
                seed = options.get("seed")
                own = {"seed": None if seed is None else seed + i, "score_prompt": parsed.echo and logprobs and i == 0}
                tasks.append((prompt.ids, {**options, **own}))
        replies = (
            build(prompts)
            if build is not None
            else ReplyBuilder(self.tokenizer, self.name, prompts, parser, n=parsed.n, logprobs=logprobs, echo=parsed.echo)
        )
        headers = _ignored_fields(parsed)
        response = TaskResponse(self.engine, tasks, request, parsed.slot)
        if parsed.stream:
            return response.stream(replies, headers, parsed.include_usage)
        return await response.complete(replies, headers)

    def _check_prompts(self, parsed: CompletionRequest, prompts: Sequence[Prompt], param: str) -> None:
        """Raises RequestError for prompts that do not fit into the context with an answer, and for more than a request may
        cost: tokens of all prompts, and log probabilities of all choices."""
        n_ctx, n_predict = self.model.n_ctx, parsed.options.get("n_predict", -1)
        for i, prompt in enumerate(prompts):
            name = param if len(prompts) == 1 else f"{param}[{i}]"
            if not prompt.ids:
                message = "the prompt is empty, and the model has no token to begin a text with"
                raise RequestError(message, name, "invalid_value")
            if len(prompt.ids) + (n_predict != 0) > n_ctx:
                message = f"the prompt has {len(prompt.ids)} tokens, and the context holds {n_ctx} with the answer"
                raise RequestError(message, name, CONTEXT_EXCEEDED, n_prompt_tokens=len(prompt.ids), n_ctx=n_ctx)
        total = sum(len(prompt.ids) for prompt in prompts)
        if total > self.most_tokens:
            message = f"the prompts have {total} tokens, and a request may have {self.most_tokens}"
            raise RequestError(message, param=param, code=CONTEXT_EXCEEDED)
        if "n_probs" in parsed.options:
            per_token, total = 1 + parsed.options["n_probs"], 0
            for prompt in prompts:
                free = n_ctx - len(prompt.ids)
                generated = max(parsed.n, parsed.best_of) * (free if n_predict < 0 else min(free, n_predict))
                total += per_token * (generated + parsed.echo * parsed.n * len(prompt.ids))
            most = max(_MAX_LOGPROBS, per_token * n_ctx)
            if total > most:
                message = f"up to {total} log probabilities are asked for, and a request may have {most}: "
                raise RequestError(message + "fewer choices, or a smaller max_tokens, need less", "logprobs", "invalid_value")


def _ignored_fields(parsed: CompletionRequest) -> dict[str, str]:
    """The header that names the fields of a request without effect."""
    ignored = [name for name in parsed.ignored if _HEADER_SAFE_NAME.fullmatch(name)][:20]
    return {"X-Ignored-Fields": ", ".join(ignored)} if ignored else {}
