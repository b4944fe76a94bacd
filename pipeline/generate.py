"""`ggufmill generate`: a prompt is continued."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import UsageError
from ..runtime import Model, Sampling, Timings
from ..runtime.generation.generate import generate, warm_up
from ..runtime.generation.grammar import Grammar, compile_grammar, compile_schema
from .common.models import ModelLike, open_generating_model
from .common.progress import OnProgress, Stage, reporting


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


def generate_text(
    model: ModelLike,
    prompt: str,
    *,
    n_predict: int = 128,
    stop: Sequence[str] = (),
    ignore_eos: bool = False,
    draft_max: int = 0,
    grammar: str | None = None,
    json_schema: str | Mapping[str, Any] | None = None,
    on_text: Callable[[str], None] | None = None,
    progress: OnProgress | bool | None = None,
    **options: Any,
) -> GeneratedText:
    """Continues a prompt.

    model       a GGUF file, a checkpoint folder, or what `ggufmill.runtime.load_model` gave
    prompt      text to continue; control tokens spelled out in it are recognised
    n_predict   tokens at most; -1: no limit
    stop        texts that end the generation and are not given out
    ignore_eos  go on after the end-of-text token
    draft_max   tokens that the model's draft layer (multi-token prediction) proposes for each pass; the text stays the same
    grammar     GBNF, or llguidance's dialect of Lark, that the text follows
    json_schema the text is JSON that fits this schema (an object, or its JSON)
    on_text     called with each piece of the text as it comes
    options     of `Sampling`: temp, top_k, top_p, min_p, typical_p, top_n_sigma, xtc_probability, xtc_threshold,
                dynatemp_range, dynatemp_exponent, repeat_penalty, repeat_last_n, presence_penalty, frequency_penalty,
                dry_multiplier, dry_base, dry_allowed_length, dry_penalty_last_n, dry_sequence_breakers, mirostat,
                mirostat_tau, mirostat_eta, logit_bias, seed; and settings of `load_model`, as for `perplexity`, with n_ctx
    progress    stage 'generate' in tokens, from when the model is loaded

    Returns a `GeneratedText`. Raises PlanError for an empty prompt, options out of range, an invalid grammar or draft_max
    without draft layers, UsageError for a grammar and a schema, MillError when the prompt does not fit into the context.

    Example:
        >>> from ggufmill import generate_text
        >>> from ggufmill.recipes import FOLDER
        >>> result = generate_text(FOLDER / "demo", "The list", n_predict=8, temp=0)
        >>> len(result.tokens), result.reason
        (8, 'length')
    """
    sampling, settings = split_options(options)
    opened = open_generating_model(model, settings)
    rules = _grammar(opened, grammar, json_schema)
    warm_up(opened)
    running = generate(
        opened, prompt, n_predict, stop=stop, ignore_eos=ignore_eos, draft_max=draft_max, grammar=rules, **sampling
    )
    with reporting(progress) as report:
        stage = Stage(report, "generate", n_predict if n_predict >= 0 else None, "token")
        pieces = []
        for piece in running:
            pieces.append(piece)
            if on_text is not None:
                on_text(piece)
            stage.reach(len(running.tokens))
    return GeneratedText(prompt, "".join(pieces), running.tokens, running.reason, running.timings)


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


def split_options(options: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of `Sampling`, settings of `load_model`) of keyword arguments that are either."""
    names = {field.name for field in fields(Sampling)}
    sampling = {name: value for name, value in options.items() if name in names}
    return sampling, {name: value for name, value in options.items() if name not in names}
