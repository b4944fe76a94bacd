"""`ggufmill generate`: a prompt is continued."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from ..data_classes import dataclass
from ..errors import UsageError
from ..runtime import Model, Timings
from ..runtime.generation.generate import compile_for_generation, generate
from ..runtime.generation.grammar import Grammar, compile_grammar, compile_schema
from .common.models import open_generating_model
from .common.progress import Stage, reporting
from .common.shown import shown
from .requests.generate import GenerateRequest, sampling_of
from .requests.running import settings_of
from .requests.verb import verb


@shown
@dataclass(frozen=True)
class GeneratedText:
    """A prompt and what a model made of it.

    text     what follows the prompt; tokens: its token ids
    reason   why it ended: 'eos', 'length' (n_predict), 'context' (full) or 'stop' (a stop text)
    timings  tokens and seconds of reading the prompt and of generating
    """

    prompt: str
    text: str
    tokens: list[int]
    reason: str
    timings: Timings

    def as_json(self) -> dict[str, Any]:
        """What --json prints: prompt, text, tokens, reason, prompt_tokens, prompt_per_second, generated_per_second, and with
        drafts drafted_tokens, accepted_tokens and acceptance_rate."""
        drafts = {name: getattr(self.timings, name) for name in ("drafted_tokens", "accepted_tokens", "acceptance_rate")}
        return {
            "prompt": self.prompt,
            "text": self.text,
            "tokens": self.tokens,
            "reason": self.reason,
            "prompt_tokens": self.timings.prompt_tokens,
            "prompt_per_second": self.timings.prompt_per_second,
            "generated_per_second": self.timings.generated_per_second,
            **(drafts if self.timings.drafted_tokens else {}),
        }


@verb(GenerateRequest)
def generate_text(request: GenerateRequest) -> GeneratedText:
    """Continues a prompt.

    Returns a `GeneratedText`. Raises PlanError for an empty prompt, options out of range, an invalid grammar or draft_max
    without draft layers, UsageError for a grammar and a schema, MillError when the prompt does not fit into the context.

    Example:
        >>> from ggufmill import generate_text
        >>> from ggufmill.recipes import FOLDER
        >>> result = generate_text(FOLDER / "demo", "The list", n_predict=8, temp=0)
        >>> len(result.tokens), result.reason
        (8, 'length')
    """
    opened = open_generating_model(request.model, settings_of(request))
    rules = _grammar(opened, request.grammar, request.json_schema)
    compile_for_generation(opened)
    running = generate(
        opened,
        request.prompt,
        request.n_predict,
        stop=request.stop,
        ignore_eos=request.ignore_eos,
        draft_max=request.draft_max,
        grammar=rules,
        **sampling_of(request, opened),
    )
    with reporting(request.progress) as report:
        stage = Stage(report, "generate", request.n_predict if request.n_predict >= 0 else None, "token")
        pieces = []
        for piece in running:
            pieces.append(piece)
            if request.on_text is not None:
                request.on_text(piece)
            stage.reach(len(running.tokens))
    return GeneratedText(request.prompt, "".join(pieces), running.tokens, running.reason, running.timings)


def _grammar(model: Model, grammar: str | None, json_schema: str | Mapping[str, Any] | None) -> Grammar | None:
    if grammar is not None and json_schema is not None:
        raise UsageError("a text follows a grammar or a JSON schema, not both")
    if grammar is not None:
        return compile_grammar(model.tokenizer, grammar)
    if json_schema is None:
        return None
    try:
        schema = json.loads(json_schema) if isinstance(json_schema, str) else json_schema
    except (ValueError, RecursionError) as error:
        raise UsageError(f"the JSON schema is not JSON: {error}") from None
    if not isinstance(schema, Mapping):
        raise UsageError("the JSON schema has to be an object")
    return compile_schema(model.tokenizer, schema)
