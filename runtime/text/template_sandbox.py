"""Renders chat templates in jinja2's sandbox, with limits on processor time and on the size of the values that they create.

jinja2's sandbox keeps a template away from Python's internals, but neither from `{{ 'x' * 10**10 }}` nor from nested loops. A
template comes with a file from somewhere, so both are refused here. What these checks cannot see, such as one comparison of
deeply shared lists, is stopped by the limits of the process: this file is also the program that `template_process.py` starts.
For that reason it imports nothing of this package but, as a program, the functions that set these limits.
"""

from __future__ import annotations

import json
import re
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

SECONDS = 5.0  # processor time of one rendering; real templates take a few milliseconds
MEMORY = 1 << 30  # bytes of address space of the process
MAX_SIZE = 1 << 24  # size of one value: characters of a string, items of a list, bits of an integer
_MAX_TOTAL_SIZE = 1 << 30  # sum of the sizes of all values that one rendering creates
_MAX_PRODUCT = 1 << 20  # size of the result of `*` and `**`
_MAX_WIDTH = 1 << 16  # integer arguments of methods and filters that pad: widths and indents
_PADDING_FILTERS = ("center", "indent", "wordwrap", "batch", "slice", "format")


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """The jinja2 environment of chat templates. Operations beyond the limits raise SecurityError."""

    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[LoopControlExtension, _GenerationBlock])
        self.filters |= {name: limit_widths(self.filters[name]) for name in _PADDING_FILTERS}
        self.filters["join"] = _join
        self.filters["tojson"] = limit_widths(_tojson)
        self.globals.pop("lipsum", None)
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": lambda format: datetime.now().strftime(format),
            "dict": lambda *values, **named: dict(*values, **named),
            "namespace": _Namespace,
        }

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        integers = isinstance(left, int) and isinstance(right, int)
        if operator == "+":
            _count_size(_size(left) + _size(right))
        elif operator == "**" and integers:
            _count_size(left.bit_length() * max(right, 0), _MAX_PRODUCT)
        elif operator == "*" and integers:
            _count_size(left.bit_length() + right.bit_length(), _MAX_PRODUCT)
        elif operator == "*" and (isinstance(left, int) or isinstance(right, int)):
            _count_size(_size(right) * left if isinstance(left, int) else _size(left) * right, _MAX_PRODUCT)
        elif operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *values: Any, **named: Any) -> Any:
        function = getattr(__obj, "__wrapped__", __obj)  # jinja2 wraps str.format
        text, method = getattr(function, "__self__", None), getattr(function, "__name__", "")
        if isinstance(text, str):
            _check_widths((*values, *named.values()))
            if method == "replace" and len(values) > 1 and isinstance(values[0], str) and isinstance(values[1], str):
                _count_size(len(text) + text.count(values[0]) * len(values[1]))
            elif method == "join" and values:
                values = (_count_join(text, values[0]), *values[1:])
            elif method in ("format", "format_map"):
                _check_format(text, (*values, *named.values()))
        return super().call(__context, __obj, *values, **named)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """The operator `~`."""
        _count_size(sum(map(_size, parts)))
        return str_join(parts)


class _CodeGenerator(CodeGenerator):
    """Compiles `~` to a call of `TemplateEnvironment.concatenate`, which checks the size."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


TemplateEnvironment.code_generator_class = _CodeGenerator


class _Namespace(Namespace):
    """jinja2's namespace(), without names that begin with an underscore."""

    def __init__(*args: Any, **values: Any) -> None:
        self, *rest = args
        for name in dict(*rest, **values):
            _check_name(name)
        Namespace.__init__(self, *rest, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        Namespace.__setitem__(self, name, value)


def _check_name(name: str) -> None:
    if name.startswith("_"):
        raise SecurityError(f"a name may not begin with an underscore: {name}")


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False) -> str:
    """The filter of transformers: jinja2's own escapes '<' and sorts keys."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class _GenerationBlock(Extension):
    """{% generation %} ... {% endgeneration %}, with which trainers mark answers: renders its body unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return list(parser.parse_statements(("name:endgeneration",), drop_needle=True))


_counter = threading.local()  # total: sum of the sizes of the values that this thread's rendering has created


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Context in which Python code of this thread raises SecurityError after `seconds` of processor time."""
    end, outer_trace, n_events = time.thread_time() + seconds, sys.gettrace(), 0
    _counter.total = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        nonlocal n_events
        n_events += 1  # reading the clock costs more than the rest
        if n_events % 64 == 0 and time.thread_time() > end:
            raise SecurityError(f"it runs for more than {seconds:.0f} seconds")
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(outer_trace)


def join_limited(pieces: Iterator[str]) -> str:
    """Joins the pieces of a rendered text. Raises SecurityError as soon as they are longer than MAX_SIZE."""
    parts, size = [], 0
    for piece in pieces:
        size += len(piece)
        _count_size(size)
        parts.append(piece)
    return "".join(parts)


def _count_size(size: int, limit: int = MAX_SIZE) -> None:
    """Counts a value that is about to be created. Raises SecurityError if it, or the sum of all, is too large."""
    _counter.total = getattr(_counter, "total", 0) + max(size, 0)
    if size > limit or _counter.total > _MAX_TOTAL_SIZE:
        raise SecurityError("its output is too large: too many characters, items or bits")


def _size(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple | dict | bytes) else 1


def _check_widths(values: Iterable[Any]) -> None:
    if any(isinstance(v, int) and abs(v) > _MAX_WIDTH for v in values):
        raise SecurityError(f"a width of more than {_MAX_WIDTH:,}")


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Checks the widths of a format: digits in its text, or values ('%*d', '{:{}}')."""
    if re.search(r"[0-9]{5}", text):
        raise SecurityError(f"a format with a large number: {text[:40]!r}")
    if "*" in text or "}" in text.replace("{}", ""):
        _check_widths(values)


def limit_widths(filter: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with integer arguments up to _MAX_WIDTH. jinja2's decorators of it, such as @pass_environment, still apply."""

    def checked(*values: Any, **named: Any) -> Any:
        _check_widths((*values, *named.values()))
        if filter.__name__ == "do_format" and isinstance(values[0], str):
            _check_format(values[0], values[1:])
        return filter(*values, **named)

    checked.__dict__.update(filter.__dict__)
    return checked


def _count_join(separator: str, parts: Any) -> list[Any]:
    """The parts as a list, after the size of their join has been counted."""
    items = list(parts)
    _count_size(sum(map(_size, items)) + len(separator) * len(items))
    return items


@pass_eval_context
def _join(context: EvalContext, value: Any, d: str = "", attribute: str | int | None = None) -> str:
    """jinja2's filter `join` within the limits."""
    items = value if attribute is None else map(make_attrgetter(context.environment, attribute), value)
    return sync_do_join(context, _count_join(str(d), items), d)


# -- the process


_MAX_MESSAGE = 2000  # characters of an error message


@lru_cache(64)
def _compile(text: str) -> Template:
    return TemplateEnvironment().from_string(text)


def run_template(request: dict[str, Any]) -> dict[str, Any]:
    """Renders, or only compiles, a template; request and result are plain JSON values.

    request: "text" of the template, "seconds" of processor time that it may take, and "variables" (None: compile only).
    Returns {"text": rendered text}, or {"error": KIND, "message": text}, where KIND is 'syntax' (then with "line"), 'refused'
    (beyond the sandbox or a limit), 'template' (raised by the template itself) or the name of a Python exception.
    """
    try:
        with time_limit(request["seconds"]):
            template = _compile(request["text"])
            variables = request["variables"]
            return {"text": "" if variables is None else join_limited(template.generate(variables))}
    except TemplateSyntaxError as error:
        return {"error": "syntax", "message": f"{error.message}"[:_MAX_MESSAGE], "line": error.lineno}
    except TemplateError as error:
        kind = "refused" if isinstance(error, SecurityError) else "template"
        return {"error": kind, "message": f"{error}"[:_MAX_MESSAGE]}
    except MemoryError:
        return {"error": "refused", "message": f"it takes more than {MEMORY >> 20} MiB of memory"}
    except Exception as error:  # whatever the template's expressions raise
        return {"error": type(error).__name__, "message": f"{error}"[:_MAX_MESSAGE]}


# Run before the limits are set, as importing opens files: between them they make Python and jinja2 import all that they import
# on demand.
_WARM_UP = (
    "{{ 'a\\n\\N{BULLET}' | pprint }}{{ strftime_now('%c') }}{{ ('<a> b' | striptags | wordwrap(2)) ~ 1.5 | round }}",
    "{{ 1 + 'a' }}",
    "{% if %}",
)


def answer_requests(requests: BinaryIO, results: BinaryIO, limit_time: Callable[[float], None]) -> None:
    """Runs each request, a line of JSON, and writes its result as a line of JSON, until the input ends.

    limit_time: lets the system end this process after that many seconds of processor time.
    """
    for line in requests:
        request = json.loads(line)
        limit_time(request["seconds"])  # code outside of Python has no other limit
        results.write(json.dumps(run_template(request)).encode("ascii") + b"\n")
        results.flush()


if __name__ == "__main__":
    # pyright does not follow editable installations.
    from ggufmill.operating_system.process import limit_cpu_time, limit_process  # pyright: ignore[reportMissingImports]

    for text in _WARM_UP:
        run_template({"text": text, "variables": {}, "seconds": SECONDS})
    limit_process(MEMORY)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal is for the parent process
    answer_requests(sys.stdin.buffer, sys.stdout.buffer, limit_cpu_time)
