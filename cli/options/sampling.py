"""Options of verbs that generate text; they become the fields of `Sampling`."""

from __future__ import annotations

import click

from .flags import together

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
    click.option("-s", "--seed", type=click.IntRange(0), help="The same seed gives the same text."),
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
