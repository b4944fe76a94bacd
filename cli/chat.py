"""`ggufmill chat` talks with a model in the terminal."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ..operating_system.process import signals_handled_as
from ..pipeline.requests.generate import ChatRequest
from .command import Verb
from .display.console import speeds_text
from .display.messages import say
from .options.fields import options_of

if TYPE_CHECKING:
    from ..runtime.text.chat import Conversation

_HELP = """\
/help    this list
/reset   forget the conversation, keep the system message
/exit    end (so does Ctrl-D)
A line that ends with \\ continues in the next one. Ctrl-C ends an answer."""


@click.command(cls=Verb)
@options_of(ChatRequest, json=False)
@click.option("--timings", is_flag=True, help="Show counts and speeds after each answer, on stderr.")
def command(model: Path, timings: bool, **options: Any) -> None:
    """Talk with MODEL (a GGUF or a Hugging Face folder), which writes its answers token by token.

    Messages are written by the model's own chat template. The KV cache of earlier turns is reused: a new message costs its
    own tokens only. Messages are lines of the standard input, so that a conversation can come from a file: the first one that
    cannot be answered then ends it. Where the file recommends how to sample, that takes the place of the defaults of options.

    \b
    Examples:
      ggufmill chat model-iq4_k.gguf
      ggufmill chat model.gguf --system "Answer in French." --temp 0
      echo "What is the capital of Peru?" | ggufmill chat base-model.gguf --template chatml
    """
    from ..formats.metadata_values import text_of
    from ..pipeline.chat import start_chat

    conversation = start_chat(model, **options)
    if sys.stdin.isatty():
        name = text_of(conversation.model.metadata, "general.name") or model.name
        say(f"{name}. /help shows the commands.")
    with _exit_on_termination():
        for text in _messages():
            if text in ("/exit", "/quit"):
                break
            elif text == "/reset":
                conversation.reset()
            elif text.startswith("/"):
                unknown = "" if text == "/help" else f"there is no command {text.split()[0]}\n"
                click.echo(unknown + _HELP, err=True)
            else:
                _answer(conversation, text, timings)


def _messages() -> Iterator[str]:
    """The messages that the user types, without blank lines, until the input ends. Ctrl-C drops the line."""
    prompt = ""
    if sys.stdin.isatty():
        prompt = "> "
        with suppress(ImportError):
            import readline  # noqa: F401  (gives input() a history and editing)
    lines: list[str] = []
    while True:
        try:
            line = input(". " if lines and prompt else prompt)
        except EOFError:
            if prompt:
                click.echo()
            line = ""
            if not lines:
                return
        except KeyboardInterrupt:
            click.echo("\n/exit or Ctrl-D ends the conversation", err=True)
            lines = []
            continue
        if line.endswith("\\"):
            lines.append(line[:-1])
            continue
        text = "\n".join([*lines, line]).strip()
        lines = []
        if text:
            yield text


def _answer(conversation: Conversation, text: str, timings: bool) -> None:
    from ..formats import MillError

    n_dropped = conversation.n_dropped
    try:
        with _interrupt_cancels(conversation):
            for piece in conversation.answer(text):
                click.echo(printable(piece), nl=False)
    except MillError as error:
        if not sys.stdin.isatty():  # messages from a file: nobody can rephrase this one
            raise
        click.echo(f"ggufmill: {error}", err=True)
        return
    click.echo()
    if conversation.n_dropped > n_dropped:
        say(f"(the context is full: the oldest {conversation.n_dropped} messages are forgotten)")
    generation = conversation.generation
    reasons = {"length": "-n tokens are reached", "context": "the context is full", "cancelled": "interrupted"}
    if generation is not None and generation.reason in reasons:
        say(f"({reasons[generation.reason]})")
    if generation is not None and timings:
        click.echo(f"({speeds_text(generation.timings)})", err=True)


def printable(text: str) -> str:
    """The text without control characters, which a terminal would obey: a model may have learned any."""
    return "".join(c for c in text if c in "\n\t" or not (c < " " or "\x7f" <= c < "\xa0"))


@contextmanager
def _interrupt_cancels(conversation: Conversation) -> Iterator[None]:
    """Within this, Ctrl-C ends the answer under way; a second one before it has ended is an interrupt as usual."""

    def once(number: int, frame: Any) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        conversation.cancel()

    before = signal.signal(signal.SIGINT, once)
    try:
        yield
    except KeyboardInterrupt:
        click.echo()
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _exit_on_termination() -> Iterator[None]:
    """SIGTERM and the other signals that ask the program to end are not Ctrl-C here: they end it."""

    def end(number: int, frame: Any) -> None:
        sys.exit(128 + number)

    before = signal.getsignal(signal.SIGTERM)
    numbers = {signal.SIGTERM, *signals_handled_as(signal.SIGTERM)}
    for each in numbers:
        signal.signal(each, end)
    try:
        yield
    finally:
        for each in numbers:
            signal.signal(each, before)
