"""Options of verbs that generate text; they become the fields of `Sampling`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import click

from ...errors import FormatError, PlanError
from ...formats.file_range import read_text
from ...runtime.generation.sampling_options import DEFAULT_ORDER, parse_samplers
from .flags import together


class TokenBias(click.ParamType):
    """A token's id and what is added to its logit, such as 15043+1, 15043-0.5 or 15043-inf."""

    name = "TOKEN_ID(+/-)BIAS"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        match = re.fullmatch(r"(\d{1,9})([+-](?:inf|\d+(?:\.\d*)?))", value)
        if match is None or match[2] == "+inf":
            self.fail(f"{value!r} is not like 15043+1 or 15043-inf: a token's id, and what is added to its logit", param, ctx)
        return int(match[1]), float(match[2])


_ESCAPE = re.compile(r"\\([ntr\\\"'])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}


def _breakers(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Sequence breakers, with line ends written as \\n; none at all for "none" alone."""
    if "none" in value and len(value) > 1:
        raise click.BadParameter("none does not go with others")
    return (
        () if value == ("none",) else tuple(_ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text) for text in value)
    )


def _samplers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    try:
        return parse_samplers(value)
    except PlanError as error:
        raise click.BadParameter(str(error)) from None


# All have llama.cpp's names and defaults.
sampling_options = together(
    click.option("--temp", type=click.FloatRange(0), default=0.8, show_default=True, help="0: always the most probable token."),
    click.option(
        "--top-k", type=click.IntRange(0), default=40, show_default=True, help="Keep the most probable tokens; 0: off."
    ),
    click.option(
        "--top-p",
        type=click.FloatRange(0, 1, min_open=True),
        default=0.95,
        show_default=True,
        help="Nucleus sampling: keep the most probable tokens up to this cumulative probability; 1: off.",
    ),
    click.option(
        "--min-p",
        type=click.FloatRange(0, 1),
        default=0.05,
        show_default=True,
        help="Keep tokens this probable against the first; 0: off.",
    ),
    click.option(
        "--typical",
        "--typical-p",
        "typical_p",
        type=click.FloatRange(0, 1, min_open=True),
        default=1.0,
        show_default=True,
        help="Locally typical sampling: tokens nearest to the expected surprise, up to this probability; 1: off.",
    ),
    click.option(
        "--top-nsigma",
        "--top-n-sigma",
        "top_n_sigma",
        type=float,
        default=-1.0,
        show_default=True,
        help="Keep tokens within so many standard deviations of the largest logit; 0 or less: off.",
    ),
    click.option(
        "--xtc-probability",
        type=click.FloatRange(0, 1),
        default=0.0,
        show_default=True,
        help="How often all tokens above --xtc-threshold but the least probable of them are excluded; 0: off.",
    ),
    click.option(
        "--xtc-threshold",
        type=click.FloatRange(0, 1),
        default=0.1,
        show_default=True,
        help="Probability for --xtc-probability.",
    ),
    click.option(
        "--dynatemp-range",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="The temperature follows the entropy, from --temp minus this to --temp plus this; 0: off.",
    ),
    click.option(
        "--dynatemp-exp",
        "dynatemp_exponent",
        type=click.FloatRange(0),
        default=1.0,
        show_default=True,
        help="Exponent of the entropy for --dynatemp-range.",
    ),
    click.option(
        "-l",
        "--logit-bias",
        type=TokenBias(),
        multiple=True,
        callback=lambda ctx, param, value: dict(value),
        help="Added to the logit of a token, such as 15043+1 or 15043-inf; repeatable.",
    ),
    click.option(
        "--repeat-penalty",
        type=click.FloatRange(0, min_open=True),
        default=1.0,
        show_default=True,
        help="Against recent tokens; 1: off.",
    ),
    click.option(
        "--repeat-last-n", type=click.IntRange(-1), default=64, show_default=True, help="Tokens that count as recent; -1: all."
    ),
    click.option(
        "--presence-penalty", type=float, default=0.0, show_default=True, help="Subtracted from recent tokens' logits."
    ),
    click.option(
        "--frequency-penalty", type=float, default=0.0, show_default=True, help="The same for each time a token occurred."
    ),
    click.option(
        "--dry-multiplier",
        type=click.FloatRange(0),
        default=0.0,
        show_default=True,
        help="DRY (don't repeat yourself): penalty of tokens that would lengthen a repetition; 0: off.",
    ),
    click.option(
        "--dry-base",
        type=click.FloatRange(1),
        default=1.75,
        show_default=True,
        help="Base of that penalty, which grows with the length of the repetition.",
    ),
    click.option(
        "--dry-allowed-length",
        type=click.IntRange(0),
        default=2,
        show_default=True,
        help="Length in tokens from which on a repetition has that penalty.",
    ),
    click.option(
        "--dry-penalty-last-n",
        type=click.IntRange(-1),
        default=-1,
        show_default=True,
        help="Tokens that are searched for repetitions; -1: all, 0: none.",
    ),
    click.option(
        "--dry-sequence-breaker",
        "dry_sequence_breakers",
        multiple=True,
        default=("\n", ":", '"', "*"),
        callback=_breakers,
        metavar="TEXT",
        help="No repetition goes across this text; repeatable, in place of the default; none: no text.  "
        '[default: line end, ":", double quote, "*"]',
    ),
    click.option(
        "--mirostat",
        type=click.IntRange(0, 2),
        default=0,
        show_default=True,
        help="Mirostat of this version, in place of filters and penalties, keeps the surprise near --mirostat-ent; 0: off.",
    ),
    click.option(
        "--mirostat-ent",
        "mirostat_tau",
        type=click.FloatRange(0),
        default=5.0,
        show_default=True,
        help="Target of Mirostat: bits of surprise per token.",
    ),
    click.option(
        "--mirostat-lr",
        "mirostat_eta",
        type=click.FloatRange(0),
        default=0.1,
        show_default=True,
        help="How fast Mirostat follows its target.",
    ),
    click.option(
        "--samplers",
        "--sampling-seq",
        "--sampler-seq",
        "samplers",
        default=";".join(DEFAULT_ORDER),
        show_default=True,
        callback=_samplers,
        metavar="NAME;NAME",
        help="Samplers in their order, by name, or by llama.cpp's letters (edskypmxt); one that is left out does nothing.",
    ),
    click.option("-s", "--seed", type=click.IntRange(0), help="The same seed gives the same text."),
)


def _once(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """A text that an option gives, or that it has from the file that its -file option named."""
    name = str(parameter.name).removesuffix("_file")
    earlier = context.params.get(name)
    if value is not None and earlier is not None:
        raise click.UsageError(f"--{name.replace('_', '-')} is given both as text and as a file")
    return earlier if value is None else value


def _read_text(context: click.Context, parameter: click.Parameter, value: str | None) -> None:
    """Gives the text of a file to the option without -file."""
    if _once(context, parameter, value) is None or value is None:
        return
    try:
        context.params[str(parameter.name).removesuffix("_file")] = read_text(Path(value), pipes=True)
    except (OSError, ValueError, FormatError) as error:
        raise click.BadParameter(f"{value} cannot be read: {getattr(error, 'strerror', None) or error}") from None


# llama.cpp's names.
grammar_options = together(
    click.option(
        "--grammar",
        metavar="GRAMMAR",
        callback=_once,
        help="Grammar that the text follows: GBNF, or Lark as llguidance reads it.",
    ),
    click.option("--grammar-file", metavar="FILE", expose_value=False, callback=_read_text, help="File with a grammar."),
    click.option(
        "-j", "--json-schema", metavar="SCHEMA", callback=_once, help="The text is JSON that fits this schema; {}: any JSON."
    ),
    click.option(
        "-jf", "--json-schema-file", metavar="FILE", expose_value=False, callback=_read_text, help="File with a JSON schema."
    ),
)

draft_option = click.option(
    "--draft-max",
    type=click.IntRange(0),
    default=0,
    show_default=True,
    help="Tokens that the model's draft layer (MTP) proposes for each pass. The text stays the same. 0: none.",
)
template_option = click.option(
    "--template",
    metavar="FILE|NAME",
    help="Chat template: a Jinja file, or a name such as chatml, llama3, gemma. [default: the model's own]",
)
