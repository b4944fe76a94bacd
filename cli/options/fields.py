"""The options of a command, made of the fields of a request (request_fields.py)."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click
from click.core import ParameterSource

from ...request_fields import Field, fields_of, section_of
from ...runtime.generation.sampling_options import Sampling
from ...runtime.settings import PlacementOptions, Settings
from . import running
from .flags import Decorator, as_json, together
from .sections import SectionedOption
from .types import (
    FILE,
    FILE_TYPE,
    MODEL,
    OUT,
    OUT_FILE,
    REGEX,
    SIZE,
    SIZES,
    TEXT,
    TYPE,
    CalibrationPath,
    Listed,
    Override,
    SourceName,
)


def _check_plot(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    from ...pipeline.reports.style import check_picture

    if path is not None:
        check_picture(path)
    return path


# A field's kind -> how click reads it: a type, or several arguments of click.Option.
KINDS: dict[str, Any] = {
    "checkpoint": SourceName(file_okay=False),
    "existing_folder": click.Path(exists=True, file_okay=False, path_type=Path),
    "file": FILE,
    "file_type": FILE_TYPE,
    "files": {"type": FILE, "multiple": True},
    "folder": click.Path(file_okay=False, path_type=Path),
    "machines": {
        "type": Listed(int, "a number of machines such as 8"),
        "is_flag": False,
        "flag_value": "1,2,4,8,16,32,64",
        "default": (),
    },
    "sizes": {"type": SIZES, "default": ()},
    "model": MODEL,
    "name": click.STRING,  # of a file, or of something bundled
    "names": click.STRING,  # with commas between
    "out": OUT,
    "out_file": OUT_FILE,
    "override": {"type": Override(), "multiple": True, "callback": lambda ctx, param, pairs: dict(pairs)},
    "plot": {"type": click.Path(dir_okay=False, path_type=Path), "metavar": "PNG", "callback": _check_plot},
    "regex": {"type": REGEX, "metavar": "REGEX"},
    "regexes": {"type": REGEX, "metavar": "REGEX", "multiple": True},
    "shards": {"type": click.Path(dir_okay=False, path_type=Path), "nargs": -1},
    "size": {"type": SIZE, "metavar": "SIZE"},
    "source": SourceName(),
    "text": TEXT,
    "calibration_text": CalibrationPath(),
    "type": TYPE,
    **running.KINDS,
}


def options_of(request: type, *, json: bool = True, **kinds: Any) -> Decorator:
    """The arguments and options of a request's fields, by sections of the help, as a decorator of a command.

    json: --json at the end. kinds: field -> what its kind is for this command, as a value of KINDS. Settings of `load_model`
    and fields of `Sampling` come to the command where they are given only: a model that is loaded already takes no settings,
    and a model's file may recommend how to sample.
    """
    sections = {field.name: section_of(request, field.name) for field in fields_of(request) if field.option.in_cli}
    # Groups in their order; a field of the verb's own that says that it belongs to one of them comes behind it.
    own = {field.name for field in fields_of(request) if field.option.section}
    order = list(dict.fromkeys(["", *(section for name, section in sections.items() if name not in own), *sections.values()]))
    shown = [field for field in fields_of(request) if field.option.in_cli]
    fields = sorted(shown, key=lambda field: (order.index(sections[field.name]), field.name in own))
    settings = {field.name for field in fields_of(Settings)} if issubclass(request, PlacementOptions) else set[str]()
    sampling = {field.name for field in fields_of(Sampling)} if settings and issubclass(request, Sampling) else set[str]()
    made = []
    for field in fields:
        under = {"cls": SectionedOption, "section": sections[field.name], "is_rare": field.option.rare}
        made.append(_parameter(field, kinds.get(field.name), under, may_be_unset=field.name in settings))
        made += [running.FURTHER[field.name](**under)] if field.name in running.FURTHER else []
    options = together(*made, *([as_json] if json else []))
    return (lambda command: options(_without_unset(command, settings, sampling))) if settings else options


def _without_unset(command: Callable, settings: set[str], sampling: set[str]) -> Callable:
    @functools.wraps(command)
    def called(**values: Any) -> Any:
        context = click.get_current_context()
        unset = {name for name in settings & values.keys() if values[name] in (None, ())}
        unset |= {name for name in sampling & values.keys() if context.get_parameter_source(name) is ParameterSource.DEFAULT}
        return command(**{name: value for name, value in values.items() if name not in unset})

    return called


def _parameter(field: Field, kind: Any, under: Mapping[str, Any], may_be_unset: bool) -> Decorator:
    """under: where the help has it, as arguments of click.option. may_be_unset: the command gets None where the option is not
    given."""
    option = field.option
    kind = kind if kind is not None else KINDS[option.kind] if option.kind else _kind_of_type(field)
    how: dict[str, Any] = dict(kind) if isinstance(kind, Mapping) else {"type": kind}
    if option.metavar is not None:
        how["metavar"] = option.metavar
    if option.is_argument:
        how.setdefault("required", field.is_required)
        return click.argument(field.name, **how)
    if isinstance(how.get("type"), click.IntRange | click.FloatRange | type(click.INT) | type(click.FLOAT)):
        how.setdefault("metavar", "N" if isinstance(how["type"], type(click.INT)) else "X")
    how = {"help": _help(field, may_be_unset), "hidden": option.hidden, "required": field.is_required, **under} | how
    if option.envvar is not None:
        how |= {"envvar": option.envvar, "show_envvar": True, "cls": _FromVariable}
    if "Sequence" in field.type and field.default == () and not option.kind:
        how["multiple"] = True
    names = option.flags.split() or [f"--{field.name.replace('_', '-')}"]
    if "bool" in field.type and not option.kind and "/" not in option.flags:
        names, how = _switch(names, field.default, how)
        how |= {"default": None} if may_be_unset else {}
    elif "bool" in field.type and field.default is None:
        how = {"default": None} | how
    elif not field.is_required and field.default not in (None, (), {}) and not may_be_unset:
        default = "on" if field.default is True else field.default  # of a kind of its own
        how = {"default": default, "show_default": not option.shown} | how
    return click.option(*names, field.name, **how)


class _FromVariable(SectionedOption):
    """An option that a variable of the environment sets, also where it is empty: click passes over one that is."""

    def resolve_envvar_value(self, ctx: click.Context) -> str | None:
        return os.environ.get(str(self.envvar))


def _switch(names: list[str], default: bool | None, how: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """--name, or --no-name where it holds by default, or both where it may be left open."""
    negative = [f"--no-{name.removeprefix('--')}" for name in names]
    how = {key: value for key, value in how.items() if key not in ("type", "metavar")}
    if default is None:
        return [f"{names[0]}/{negative[0]}"], how | {"default": None}
    return (
        (negative, how | {"is_flag": True, "flag_value": False, "default": True})
        if default
        else (names, how | {"is_flag": True})
    )


def _help(field: Field, may_be_unset: bool) -> str:
    shown = field.option.shown or (str(field.default) if may_be_unset and field.default not in (None, (), False) else "")
    return f"{field.option.help} [default: {shown}]" if shown else field.option.help


def _kind_of_type(field: Field) -> click.ParamType | None:
    """How a value is read whose field says no kind: by the choices, else by the text of the field's type."""
    option = field.option
    if "/" in option.flags:
        return click.BOOL
    if option.choices:
        return click.Choice(tuple(option.choices), case_sensitive=False)
    least, most = option.least, option.most
    if field.type.startswith("int"):
        return click.INT if least is most is None else click.IntRange(_whole(least), _whole(most), min_open=option.is_above)
    if field.type.startswith("float"):
        return click.FLOAT if least is most is None else click.FloatRange(least, most, min_open=option.is_above)
    return click.STRING


def _whole(number: float | None) -> int | None:
    return None if number is None else int(number)
