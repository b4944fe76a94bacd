"""How the command line reads the settings of a model that runs, and of sampling."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import click

from ...errors import FormatError, PlanError
from ...formats.file_range import read_text
from ...runtime.generation.sampling_options import DEFAULT_BREAKERS, DEFAULT_ORDER, parse_samplers
from ...runtime.settings import CACHE_TYPES
from .flags import Decorator
from .types import NAMED_TEXT, WEIGHTED_TEXT, CpuMask, CpuRange, ExpertReduction, Listed

_ESCAPE = re.compile(r"\\([ntr\\\"'])")
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r"}
_SWITCH = {"on": True, "1": True, "off": False, "0": False}


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


def _breakers(context: click.Context, parameter: click.Parameter, value: tuple[str, ...]) -> tuple[str, ...]:
    """Sequence breakers, with line ends written as \\n; none at all for "none" alone."""
    if "none" in value and len(value) > 1:
        raise click.BadParameter("none cannot be given beside others")
    return (
        () if value == ("none",) else tuple(_ESCAPE.sub(lambda match: _ESCAPED.get(match[1], match[1]), text) for text in value)
    )


def _samplers(context: click.Context, parameter: click.Parameter, value: str) -> tuple[str, ...]:
    try:
        return parse_samplers(value)
    except PlanError as error:
        raise click.BadParameter(str(error)) from None


def _one_sequence(ctx: click.Context, param: click.Parameter, value: int | None) -> int | None:
    """Refuses more than the one sequence that all verbs but `serve` work on."""
    if value is not None and value > 1:
        raise click.BadParameter("several sequences at once are for `serve`; this works on one")
    return None


def _on(ctx: click.Context, param: click.Parameter, value: str | None) -> bool | None:
    return None if value is None else _SWITCH[value]


def _with_earlier(ctx: click.Context, param: click.Parameter, value: list[int] | None) -> list[int] | None:
    """The processors of --cpu-mask and of --cpu-range together, whichever click reads first."""
    ctx.params["cpus"] = sorted({*(ctx.params.get("cpus") or ()), *(value or ())}) or None
    return ctx.params["cpus"]


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


class _Pair(click.ParamType):
    name = "pp,tg"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, int]:
        if isinstance(value, tuple):
            return value
        try:
            prompt, generation = map(int, value.split(","))
        except ValueError:
            self.fail(f"{value!r} is not two numbers like 512,128", param, ctx)
        return prompt, generation


def _cache_type(text: str) -> str:
    return {name.lower(): name for name in CACHE_TYPES}[text.lower()]


class _TypeOfLayers(click.ParamType):
    name = "TYPE,N"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, int]:
        if isinstance(value, tuple):
            return value
        name, _, count = value.partition(",")
        try:
            found = _cache_type(name), int(count)
        except (KeyError, ValueError):
            found = "", 0
        if found[1] < 1:
            known = ", ".join(CACHE_TYPES)
            self.fail(f"{value!r} is not TYPE,N: a type of {known}, and a number of layers, such as q8_0,2", param, ctx)
        return found


def _several(type: click.ParamType) -> dict[str, Any]:
    """An option that may be given several times, each time with several values."""
    return {"type": type, "multiple": True, "default": (), "callback": lambda ctx, param, given: tuple(chain(*given))}


# As KINDS of `fields`.
KINDS: dict[str, Any] = {
    "bits": {"type": click.Choice(["16", "32"]), "callback": lambda ctx, param, bits: bits and int(bits)},
    "breakers": {"multiple": True, "default": DEFAULT_BREAKERS, "callback": _breakers},
    "cache_type_of_layers": _TypeOfLayers(),
    "cache_types": _several(Listed(_cache_type, "a cache type", "TYPE")),
    "cpus": {"type": CpuMask(), "callback": _with_earlier},
    "device_names": Listed(str, "a device", "NAME"),
    "expert_reduction": ExpertReduction(),
    "mebibytes": {"type": click.IntRange(1), "callback": lambda ctx, param, n: n and n << 20, "metavar": "MiB"},
    "numbers": _several(Listed(int, "a number")),
    "once": {"callback": _once},
    "one_sequence": {"type": click.IntRange(1), "callback": _one_sequence},
    "pairs": {"type": _Pair(), "multiple": True},
    "samplers": {"default": ";".join(DEFAULT_ORDER), "callback": _samplers},
    "shares": Listed(float, "a number"),
    "switch": {
        "type": click.Choice(tuple(_SWITCH), case_sensitive=False),
        "is_flag": False,
        "flag_value": "on",
        "callback": _on,
    },
    "texts": {"multiple": True},
    "token_biases": {"type": TokenBias(), "multiple": True, "callback": lambda ctx, param, pairs: dict(pairs)},
    "named_texts": {"type": NAMED_TEXT, "multiple": True, "callback": lambda ctx, param, texts: texts or None},
    "weighted_texts": {"type": WEIGHTED_TEXT, "multiple": True},
    "zero_one": {"type": click.Choice(["0", "1"]), "default": "1", "callback": lambda ctx, param, value: value == "1"},
    "zeros_ones": _several(Listed(lambda text: {"0": False, "1": True}[text], "0 or 1", "0|1")),
}


def _file(name: str, flags: str, content: str) -> Callable[..., Decorator]:
    return functools.partial(
        click.option,
        *flags.split(),
        name,
        metavar="FILE",
        expose_value=False,
        callback=_read_text,
        help=f"Read {content} from this file.",
    )


# field -> click.option of a further one that gives its value
FURTHER: dict[str, Callable[..., Decorator]] = {
    "cpus": functools.partial(
        click.option,
        "-Cr",
        "--cpu-range",
        type=CpuRange(),
        expose_value=False,
        callback=_with_earlier,
        help="Run on these processors, and those of --cpu-mask.",
    ),
    "grammar": _file("grammar_file", "--grammar-file", "the grammar"),
    "json_schema": _file("json_schema_file", "-jf --json-schema-file", "the JSON schema"),
}
