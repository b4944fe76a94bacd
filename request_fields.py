"""Fields of requests. A field says once what an option of the command line, a keyword of the library, a key of a recipe and a
message to a worker say of it.

    @request
    class SourceOptions:
        mtp: bool | None = option("Keep draft layers, or leave them out.", default=None, key="convert.mtp")

    @request
    class ConvertRequest(SourceOptions, Output):
        source: str | Path = argument("A checkpoint's folder, or hf:OWNER/NAME.", kind="source", kw_only=False)
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from inspect import formatannotation, get_annotations
from typing import Any, Literal, NamedTuple, TypeVar, dataclass_transform

from .data_classes import dataclass

# What a worker gets of a field: its value; nothing; a path that all machines see; a file, which is sent if it is small; LoRA
# adapters, FILE=SCALE each.
Travel = Literal["value", "no", "path", "file", "adapters"]
_METADATA = "option"
C = TypeVar("C", bound=type)
Q = TypeVar("Q")


@dataclass(frozen=True)
class Option:
    """What is said of a field beside its name, type and default.

    help         one or two sentences that begin with a verb, for `--help` and the library's reference; doc: for the latter
                 alone, where it differs
    section      the heading under which `--help` has it; '': that of its group, see `section_of`
    rare         only in `--help-all`
    flags        the option's names, such as '-t --threads'; '': made of the field's name
    kind         how the command line reads the value, a name in cli/options/kinds.py; '': by the field's type
    choices      the values that there are
    least, most  of a number; is_above: least itself is too small
    metavar      what stands for the value in `--help`
    shown        what the default means, in words; '': the default itself
    key          where a TOML recipe says it, 'convert.mtp'; '': nowhere
    one_of       a name that fields share of which a recipe's value counts only if no argument gives any; '': none
    travel       what a worker of a cluster gets
    is_argument  of the command line without a flag
    in_cli       False: of the library alone
    hidden       not in `--help`
    envvar       variable of the environment that stands for the option
    json         the field of a server's request that sets it, where that has another name
    json_range   what a server's request may set it to, where that is not least to most
    """

    help: str
    doc: str = ""
    section: str = ""
    rare: bool = False
    flags: str = ""
    kind: str = ""
    choices: Sequence[str] = ()
    least: float | None = None
    most: float | None = None
    is_above: bool = False
    metavar: str | None = None
    shown: str = ""
    key: str = ""
    one_of: str = ""
    travel: Travel = "value"
    is_argument: bool = False
    in_cli: bool = True
    hidden: bool = False
    envvar: str | None = None
    json: str = ""
    json_range: tuple[float, float] | None = None


class Field(NamedTuple):
    """A field of a request: its name, the text of its type, its default (dataclasses.MISSING if it is required)."""

    name: str
    type: str
    default: Any
    option: Option

    @property
    def is_required(self) -> bool:
        return self.default is dataclasses.MISSING

    @property
    def flag(self) -> str:
        """The long name on the command line; of a switch that is on by default the one that turns it off."""
        names = self.option.flags.split() or [f"--{self.name.replace('_', '-')}"]
        long = next((name for name in names if name.startswith("--")), names[0])
        return f"--no-{long.removeprefix('--')}" if self.default is True else long


def option(
    help: str,
    *,
    default: Any = dataclasses.MISSING,
    default_factory: Any = dataclasses.MISSING,
    kw_only: bool = True,
    **more: Any,
) -> Any:
    """A field that is an option of the command line. more: of `Option`."""
    made = {"default": default} if default_factory is dataclasses.MISSING else {"default_factory": default_factory}
    return dataclasses.field(**made, kw_only=kw_only, metadata={_METADATA: Option(help, **more)})


def argument(help: str, *, default: Any = dataclasses.MISSING, kw_only: bool = True, **more: Any) -> Any:
    """A field that is an argument of the command line. kw_only: False makes it a positional one of the library's function."""
    return option(help, default=default, kw_only=kw_only, is_argument=True, **more)


@dataclass_transform(kw_only_default=True, frozen_default=True, field_specifiers=(option, argument))
def request(cls: C) -> C:
    """The decorator of a request, and of a group of fields that several requests have: a frozen dataclass."""
    return dataclass(frozen=True, kw_only=True)(cls)


@functools.cache
def fields_of(request: type) -> list[Field]:
    """The fields of a request in the order in which they are shown: its own, then those of its groups, as its bases stand."""
    known = {field.name: field for field in dataclasses.fields(request)}
    names = dict.fromkeys(name for cls in _classes(request) for name in get_annotations(cls) if name in known)
    return [
        Field(name, formatannotation(known[name].type).strip("'"), _default(known[name]), known[name].metadata[_METADATA])
        for name in names
    ]


def _default(field: dataclasses.Field[Any]) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def _classes(cls: type) -> list[type]:
    return [cls, *(each for base in cls.__bases__ for each in _classes(base))]


def section_of(request: type, name: str) -> str:
    """The heading under which `--help` has a field: what the field says, else `section` of the group that it is of; ''
    among the options of the verb itself."""
    owner = next(cls for cls in _classes(request) if name in get_annotations(cls))
    option: Option = owner.__dict__["__dataclass_fields__"][name].metadata[_METADATA]
    return option.section or owner.__dict__.get("section", "")


def values_of(request: Any, group: type | None = None) -> dict[str, Any]:
    """The values of a request by name; of the fields of one group only, if that is given."""
    return {field.name: getattr(request, field.name) for field in fields_of(group or type(request))}


def shared(request: Any, kind: Callable[..., Q], **more: Any) -> Q:
    """A request of another class with the values of the fields that both have. more: values of other fields."""
    assert isinstance(kind, type)
    common = values_of(request).keys() & {field.name for field in fields_of(kind)}
    return kind(**{**{name: getattr(request, name) for name in common}, **more})


def words_of(group: type, values: Mapping[str, Any]) -> list[str]:
    """The options of a group's fields that differ from their defaults, as words of a command line."""
    words: list[str] = []
    for field in fields_of(group):
        value = values.get(field.name, field.default)
        if value == field.default:
            continue
        name = [*field.option.flags.split(), f"--{field.name.replace('_', '-')}"][0]
        name, _, negative = name.partition("/")
        if isinstance(value, bool):
            words.append(name if value else negative or f"--no-{name.removeprefix('--')}")
            continue
        if field.type.startswith("tuple"):  # one value of several parts
            value = ",".join(map(str, value))
        unit = "B" * (field.option.kind == "size")
        words += [word for each in (value if isinstance(value, tuple) else (value,)) for word in (name, f"{each}{unit}")]
    return words
