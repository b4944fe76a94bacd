"""The kinds of values that options take, and how their text is read: what is wrong with it is said as wrong usage."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from ...errors import MillError, PlanError
from ...formats import TensorType
from ...formats.file_range import PIPED_TEXTS, pipe_blocks
from ...jobs.patterns import NamePattern, PatternError
from ...jobs.plan import parse_size
from ...recipes import BUNDLED_MODEL, bundled, find_text
from ..display.messages import say

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
_REPOSITORY = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


class ModelPath(click.Path):
    """A GGUF or a folder of a checkpoint, which exists. hub: whether the command takes hf:OWNER/NAME too."""

    def __init__(self, *, hub: bool = False, **options: Any):
        super().__init__(exists=True, path_type=Path, **options)
        self.hub = hub

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        value = bundled(os.fsdecode(value)) if ctx is not None else value
        name = os.fsdecode(value).removeprefix("hf:")
        if _REPOSITORY.fullmatch(name) and not name.endswith(".gguf") and not Path(value).exists():
            if Path(name).parent.is_dir():
                return super().convert(value, param, ctx)
            if Path(name).name == BUNDLED_MODEL:
                self.fail(f"there is no path {value}; the bundled model is called {BUNDLED_MODEL}", param, ctx)
            what = f"write hf:{name}" if self.hub else f"`ggufmill convert hf:{name} OUT.gguf` makes a model of it"
            self.fail(f"there is no path {value}; for the repository of that name, {what}", param, ctx)
        return super().convert(value, param, ctx)


MODEL = ModelPath()


def _copy_of_pipe(path: str, ctx: click.Context) -> str:
    """A file with what stands on stdin (-) or in a pipe, to be read several times as long as the command runs; any other path
    stays. It has the same name in every run, since names of texts are written into what is made of them."""
    if path != "-" and not Path(path).is_fifo():
        return path
    copies = ctx.meta.setdefault(f"{__name__}.copies", {})
    if path not in copies:
        import tempfile

        folder = ctx.with_resource(tempfile.TemporaryDirectory(prefix="ggufmill-"))
        copies[path] = os.path.join(folder, PIPED_TEXTS[path not in ("-", "/dev/stdin")])
        with open(copies[path], "wb") as copy:
            if path == "-":
                import shutil

                shutil.copyfileobj(sys.stdin.buffer, copy)
            else:
                copy.writelines(pipe_blocks(Path(path)))
    return copies[path]


class TextPath(click.Path):
    """A file that exists, a pipe, or - for what stands on stdin."""

    def __init__(self) -> None:
        super().__init__(exists=True, dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(_copy_of_pipe(str(bundled(value)), ctx) if ctx is not None else value, param, ctx)


TEXT = TextPath()


class CalibrationPath(TextPath):
    """A text, or `bundled`."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return super().convert(find_text(value), param, ctx)


class NamedText(click.ParamType):
    """PATH or NAME=PATH as a text, where PATH may be a pipe, or - for what stands on stdin."""

    name = "[name=]path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        name, sign, path = str(value).partition("=")
        if not path or not name or Path(value).exists():
            name, sign, path = "", "", str(value)
        return f"{name}{sign}{TEXT.convert(path, param, ctx)}"


NAMED_TEXT = NamedText()


class WeightedText(click.ParamType):
    """PATH or PATH:WEIGHT as a text, where PATH may be a pipe, or - for what stands on stdin."""

    name = "path[:weight]"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        path, colon, weight = value.rpartition(":")
        if not weight.isdecimal() or not colon:
            path, colon, weight = value, "", ""
        return f"{_copy_of_pipe(str(bundled(path)), ctx)}{colon}{weight}" if ctx is not None else value


WEIGHTED_TEXT = WeightedText()


class Size(click.ParamType):
    """A number of bytes: 180G, 20GiB, 3000000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except PlanError as error:
            self.fail(str(error), param, ctx)


SIZE = Size()


class Listed(click.ParamType):
    """Values separated by commas. item: makes one of its text; raises ValueError, KeyError or MillError. name: of one value;
    metavar: what stands for it in the help."""

    def __init__(self, item: Callable[[str], Any], name: str, metavar: str = "N"):
        self.item, self.name, self.metavar = item, name, metavar

    def get_metavar(self, param: click.Parameter, ctx: click.Context) -> str:
        return f"{self.metavar},..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.item(part.strip()) for part in value.split(","))
        except MillError as error:
            self.fail(str(error), param, ctx)
        except (ValueError, KeyError):
            self.fail(f"{value!r} is not {self.name} or several with commas between them", param, ctx)


SIZES = Listed(parse_size, "a size such as 24GiB", "SIZE")


class Regex(click.ParamType):
    """A regular expression, compiled."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> NamePattern:
        if isinstance(value, NamePattern):
            return value
        try:
            return NamePattern(value)
        except PatternError as error:
            self.fail(f"{value!r} is not a regular expression ({error})", param, ctx)


REGEX = Regex()


class OutputPath(click.Path):
    """A file to write, in a folder that exists: a typing error in a path makes no folders."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.name:
            self.fail(f"{os.fsdecode(value)!r} is not the name of a file", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {path.parent}; make it first", param, ctx)
        return path


OUT = OutputPath(path_type=Path)
OUT_FILE = OutputPath(dir_okay=False, path_type=Path)


class SourceName(click.ParamType):
    """A path that exists, or hf:OWNER/NAME[@REVISION]. path: options of click.Path."""

    name = "source"

    def __init__(self, **path: Any):
        self.path = ModelPath(hub=True, **path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | Path:
        if str(value).startswith("hf:") and not Path(value).exists():
            return str(value)
        if not self.path.file_okay and Path(value).is_file():
            self.fail(f"{value} is a file; give a folder, or hf:OWNER/NAME (`quantize` takes GGUFs)", param, ctx)
        try:
            return self.path.convert(value, param, ctx)  # type: ignore[return-value]
        except click.BadParameter as error:
            hub = "" if Path(value).exists() or "hf:" in error.message else " (a model of the Hub is hf:OWNER/NAME)"
            self.fail(error.message.removesuffix(".") + hub, param, ctx)


class Type(click.ParamType):
    """A tensor type in any letter case."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TensorType:
        from ...quantize.recipes.rules import RecipeError, parse_type

        if isinstance(value, TensorType):
            return value
        try:
            return parse_type(value, "")
        except RecipeError as error:
            self.fail(str(error).removeprefix(": "), param, ctx)


TYPE = Type()


class FileType(click.ParamType):
    """A file type or a tensor type in any letter case (see `parse_default`), or the number of a file type."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TensorType | str:
        from ...quantize.recipes.mixes import file_type_id, file_types
        from ...quantize.recipes.rules import RecipeError, parse_default

        if value.upper() == "COPY":
            self.fail("COPY is no type; with rules and no TYPE, tensors that no rule takes keep theirs", param, ctx)
        if value.isdecimal():
            number, value = value, next((name for name in file_types() if str(file_type_id(name)) == value), None)
            if value is None:
                self.fail(f"there is no file type {number}; give one by its name (threads are given by -t)", param, ctx)
            say(f"note: file type {number} is {value}")
        try:
            return parse_default(value, "")
        except RecipeError as error:
            self.fail(str(error).removeprefix(": "), param, ctx)


FILE_TYPE = FileType()


class Override(click.ParamType):
    """KEY=TYPE:VALUE, TYPE one of int, float, bool, str, as llama-quantize has it."""

    name = "override"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, Any]:
        import numpy as np

        if isinstance(value, tuple):
            return value
        key, _, rest = value.partition("=")
        dtype, _, text = rest.partition(":")
        parsers: dict[str, Callable[[str], Any]] = {
            "int": lambda v: np.int32(int(v)),
            "float": lambda v: np.float32(float(v)),
            "bool": lambda v: {"true": True, "false": False}[v],
            "str": str,
        }
        try:
            return key, parsers[dtype](text)
        except (KeyError, ValueError, OverflowError):
            self.fail(f"{value!r} is not KEY=TYPE:VALUE with TYPE int, float, bool or str", param, ctx)


class ExpertReduction(click.ParamType):
    """`N,T`: at least N experts per token, of the others those that weigh at least T times the strongest."""

    name = "N,T"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, float]:
        if isinstance(value, tuple):
            return value
        count, _, share = value.partition(",")
        try:
            return int(count), float(share)
        except ValueError:
            self.fail(f"{value!r} is not N,T: a number of experts and a share of the strongest, like 6,0.4", param, ctx)


class CpuMask(click.ParamType):
    """A hexadecimal number whose set bits are numbers of processors: 'ff', '0xF0'."""

    name = "hex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        digits = str(value).lower().removeprefix("0x")
        if not re.fullmatch(r"[0-9a-f]{1,4096}", digits) or not int(digits, 16):
            self.fail(f"{value!r} is no hexadecimal number above 0, such as ff", param, ctx)
        bits = int(digits, 16)
        return [i for i in range(bits.bit_length()) if bits >> i & 1]


class CpuRange(click.ParamType):
    """Numbers of processors from LO to HI, both included: '0-7'."""

    name = "lo-hi"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        match = re.fullmatch(r"(\d{1,5})-(\d{1,5})", str(value))
        if match is None or int(match[1]) > int(match[2]):
            self.fail(f"{value!r} is no range of processors, such as 0-7", param, ctx)
        return list(range(int(match[1]), int(match[2]) + 1))
