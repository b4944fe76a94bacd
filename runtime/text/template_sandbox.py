"""Where chat templates run: jinja2's sandbox, with limits on time and on the size of what a template makes.

jinja2 keeps a template away from Python's insides, but not from `{{ 'x' * 10**10 }}`, nor from loops within loops. A template
comes with a file from somewhere, so both are refused. What the limits here do not see, such as one comparison of lists that
hold each other a million times, ends with the process: this file is also a program, which `confined.py` starts. So it imports
nothing of this package.
"""

from __future__ import annotations

import json
import math
import re
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import datetime
from functools import lru_cache
from types import FrameType
from typing import Any, BinaryIO

from jinja2 import Template, TemplateError, TemplateSyntaxError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, LoopControlExtension
from jinja2.filters import make_attrgetter, sync_do_join
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import str_join
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace, pass_eval_context

SECONDS = 5.0  # of processor time for one text; real templates take a few milliseconds
MEMORY = 1 << 30  # address space of the process
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
        self.filters["tojson"] = narrow(_tojson)
        self.globals.pop("lipsum", None)
        self.globals |= {
            "raise_exception": _raise,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": lambda *values, **named: dict(*values, **named),
            "namespace": _Namespace,
        }

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


class _Namespace(Namespace):
    """jinja2's, without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **values):
            _checked_name(name)
        Namespace.__init__(self, *rest, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        Namespace.__setitem__(self, _checked_name(name), value)


def _checked_name(name: str) -> str:
    if name.startswith("_"):
        raise SecurityError(f"a name may not begin with an underscore: {name}")
    return name


def _raise(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """Not jinja2's, which writes '<' as an escape and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _Generation(Extension):
    """{% generation %} ... {% endgeneration %}: what is between, as it stands (trainers mark answers with it)."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


_made = threading.local()  # total: what this thread's template has made so far


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Within this, Python code of this thread is stopped with SecurityError after so many seconds of processor time."""
    end, outer, events = time.thread_time() + seconds, sys.gettrace(), 0
    _made.total = 0

    def look(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal events
        events += 1  # asking for the time costs more than the rest
        if events % 64 == 0 and time.thread_time() > end:
            raise SecurityError(f"it runs for more than {seconds:.0f} seconds")
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


# -- the process


_SAID = 2000  # characters of an error


@lru_cache(64)
def _compiled(text: str) -> Template:
    return Sandbox().from_string(text)


def answer(asked: dict[str, Any]) -> dict[str, Any]:
    """What comes of a template, as plain data.

    asked: text of the template, seconds that it may take, and either the variables that it gets, or None to compile it only.
    Returns {"written": text}, or {"wrong": 'syntax', 'refused', 'template' or the name of a Python exception, "said": why,
    "line": of a syntax error}.
    """
    try:
        with limited(asked["seconds"]):
            template = _compiled(asked["text"])
            variables = asked["variables"]
            return {"written": "" if variables is None else written(template.generate(**variables))}
    except TemplateSyntaxError as error:
        return {"wrong": "syntax", "said": f"{error.message}"[:_SAID], "line": error.lineno}
    except TemplateError as error:
        return {"wrong": "refused" if isinstance(error, SecurityError) else "template", "said": f"{error}"[:_SAID]}
    except MemoryError:
        return {"wrong": "refused", "said": f"it takes more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # whatever its expressions raise
        return {"wrong": type(error).__name__, "said": f"{error}"[:_SAID]}


# Between them they use the modules that Python and jinja2 import only when they are needed.
_FIRST = (
    "{{ 'a\\n\\N{BULLET}' | pprint }}{{ strftime_now('%c') }}{{ ('<a> b' | striptags | wordwrap(2)) ~ 1.5 | round }}",
    "{{ 1 + 'a' }}",
    "{% if %}",
)


def _confine() -> None:
    """From here on this process may take no more memory, write no file and open none, which importing is as well."""
    for text in _FIRST:
        answer({"text": text, "variables": {}, "seconds": SECONDS})
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    for limit in (resource.RLIMIT_CORE, resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE):
        resource.setrlimit(limit, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal; it is for the program that asks


def _allow(seconds: float) -> None:
    """The process is killed when it takes much longer than that: what is no Python code cannot be stopped otherwise."""
    used = sum(resource.getrusage(resource.RUSAGE_SELF)[:2])
    _, most = resource.getrlimit(resource.RLIMIT_CPU)
    resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(used + seconds) + 1, most))


def serve(requests: BinaryIO, answers: BinaryIO) -> None:
    """A line of JSON for each line of JSON, to the end."""
    for line in requests:
        asked = json.loads(line)
        _allow(asked["seconds"])
        answers.write(json.dumps(answer(asked)).encode("ascii") + b"\n")
        answers.flush()


if __name__ == "__main__":
    _confine()
    serve(sys.stdin.buffer, sys.stdout.buffer)
