"""Where chat templates run: jinja2's sandbox, with limits on time and on the size of what a template makes.

jinja2 keeps a template away from Python's insides, but not from `{{ 'x' * 10**10 }}`, nor from loops within loops. A template
comes with a file from somewhere, so both are refused.
"""

from __future__ import annotations

import re
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_eval_context

SECONDS = 5.0  # of processor time for one text; real templates take a few milliseconds
LARGEST = 1 << 24  # characters of a text, items of a list, bits of a number
_ALL = 1 << 30  # the same of everything that one text's making made
_REPEATED = 1 << 20  # of what `*` and `**` make
_WIDEST = 1 << 16  # for numbers given to methods and filters that pad: widths and indents
_PADS = ("center", "indent", "wordwrap", "batch", "slice", "format")


class Sandbox(ImmutableSandboxedEnvironment):
    """The environment that chat templates are compiled in. Raises SecurityError for what goes beyond the limits."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _Generation])
        self.filters |= {name: narrow(self.filters[name]) for name in _PADS}
        self.filters["join"] = _joined
        self.globals.pop("lipsum", None)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        whole = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            _within(_size(left) + _size(right))
        elif operator == "**" and whole:
            _within(left.bit_length() * max(right, 0), _REPEATED)
        elif operator == "*" and whole:
            _within(left.bit_length() + right.bit_length(), _REPEATED)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            _within(_size(right) * left if isinstance(left, int) else _size(left) * right, _REPEATED)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *values: Any, **named: Any) -> Any:
        bound = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        text, method = getattr(bound, "__self__", None), getattr(bound, "__name__", "")
        if isinstance(text, str):
            _check_numbers((*values, *named.values()))
            if method == "replace" and len(values) > 1 and isinstance(values[0], str) and isinstance(values[1], str):
                _within(len(text) + text.count(values[0]) * len(values[1]))
            elif method == "join" and values:
                values = (_counted(text, values[0]), *values[1:])
            elif method in ("format", "format_map"):
                _check_format(text, (*values, *named.values()))
        return super().call(__context, __obj, *values, **named)

    def joined(self, parts: tuple[Any, ...]) -> str:
        """What `~` makes."""
        _within(sum(map(_size, parts)))
        return str_join(parts)


class _Generator(CodeGenerator):
    """Joins with `~` through a function that looks at the size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.joined((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


Sandbox.code_generator_class = _Generator


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what is between, as it stands (trainers mark answers with it)."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


_made = threading.local()  # total: what this thread's template has made so far


@contextmanager
def limited() -> Iterator[None]:
    """Within this, Python code of this thread is stopped with SecurityError after SECONDS of processor time."""
    end, outer, events = time.thread_time() + SECONDS, sys.gettrace(), 0
    _made.total = 0

    def look(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal events
        events += 1  # asking for the time costs more than the rest
        if events % 64 == 0 and time.thread_time() > end:
            raise SecurityError(f"it runs for more than {SECONDS:.0f} seconds")
        return look

    sys.settrace(look)
    try:
        yield
    finally:
        sys.settrace(outer)


def written(pieces: Iterator[str]) -> str:
    """The pieces of a rendered text together, within the limit of its size."""
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        _within(size)
        parts.append(piece)
    return "".join(parts)


def _within(size: int, limit: int = LARGEST) -> None:
    _made.total = getattr(_made, "total", 0) + max(size, 0)
    if size > limit or _made.total > _ALL:
        raise SecurityError("it makes too much: too many characters, items or bits")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | bytes) else 1


def _check_numbers(values: Iterable[Any]) -> None:
    if any(isinstance(v, int) and abs(v) > _WIDEST for v in values):
        raise SecurityError(f"a width of more than {_WIDEST:,}")


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Widths are digits in the format, or values that stand for them."""
    if re.search(r"[0-9]{5}", text):
        raise SecurityError(f"a format with a large number: {text[:40]!r}")
    if "*" in text or "}" in text.replace("{}", ""):
        _check_numbers(values)


def narrow(run: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, with numbers up to _WIDEST. Its marks, such as @pass_environment, stay."""

    def checked(*values: Any, **named: Any) -> Any:
        _check_numbers((*values, *named.values()))
        if run.__name__ == "do_format" and isinstance(values[0], str):
            _check_format(values[0], values[1:])
        return run(*values, **named)

    checked.__dict__.update(run.__dict__)
    return checked


def _counted(separator: str, parts: Any) -> list[Any]:
    listed = list(parts)
    _within(sum(map(_size, listed)) + len(separator) * len(listed))
    return listed


@pass_eval_context
def _joined(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """jinja2's `join` within the limits."""
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return sync_do_join(context, _counted(str(d), items), d)
