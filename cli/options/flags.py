"""Options that several verbs share, and the parsing of their values."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ...formats import TYPES, MillError, PlanError, TensorType
from ...jobs.plan import parse_size


def gathered(
    options: Sequence[Callable[[Callable], Callable]], names: Sequence[str], keyword: str, make: Callable[[dict[str, Any]], Any]
) -> Callable[[Callable], Callable]:
    """A decorator that adds options to a command, which gets make(values by name) as the one keyword argument `keyword`.

    names: of the keywords that click makes of these options.
    """

    def decorate(command: Callable) -> Callable:
        @functools.wraps(command)
        def called(**given: Any) -> Any:
            values = {name: given.pop(name) for name in names}
            return command(**given, **{keyword: make(values)})

        return functools.reduce(lambda function, option: option(function), reversed(options), called)

    return decorate


class SizeName(click.ParamType):
    """A number of bytes: 180G, 20GiB, 300000."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_size(value)
        except PlanError as error:
            self.fail(str(error), param, ctx)


SIZE = SizeName()


class Listed(click.ParamType):
    """Values separated by commas. item: makes one of its text; raises ValueError, KeyError or MillError."""

    def __init__(self, item: Callable[[str], Any], name: str):
        self.item, self.name = item, name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        try:
            return tuple(self.item(part.strip()) for part in value.split(","))
        except (ValueError, KeyError, MillError):
            self.fail(f"{value!r} is not {self.name} or several with commas between them", param, ctx)


SIZES = Listed(parse_size, "a size such as 24GiB")


class RegexName(click.ParamType):
    """A regular expression, compiled."""

    name = "regex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> re.Pattern[str]:
        try:
            return re.compile(value)
        except (re.error, OverflowError, RecursionError) as error:
            self.fail(f"{value!r} is not a regular expression ({error})", param, ctx)


REGEX = RegexName()

as_json = click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
force = click.option("--force", is_flag=True, help="Replace an existing output.")
resume = click.option("--resume", is_flag=True, help="Go on with a job that was interrupted.")
verify = click.option(
    "--verify", is_flag=True, help="Read a sample of every tensor back, decode it and compare it with the source."
)
manifest = click.option(
    "--manifest",
    is_flag=True,
    help="Write OUT.manifest: sha256 of every tensor, for `ggufmill hash --check`. A split's is named after its first file.",
)
dry_run = click.option("--dry-run", is_flag=True, help="Show the plan with exact sizes; write nothing.")
threads = click.option("-t", "--threads", type=click.IntRange(1), help="Worker threads. [default: all processors]")
allow_nonfinite = click.option(
    "--allow-nonfinite", is_flag=True, help="Write 0 for weights that are NaN or infinite, and count them."
)
split_max_size = click.option(
    "--split-max-size", type=SIZE, metavar="SIZE", help="Split the output into files of at most this size (50G)."
)
split_max_tensors = click.option("--split-max-tensors", type=click.IntRange(1), help="Split after this many tensors.")
tensor_first_split = click.option(
    "--no-tensor-first-split",
    "tensor_first_split",
    is_flag=True,
    flag_value=False,
    default=True,
    help="Write no tensors to the first file of a split, only the metadata.",
)
keep_split = click.option("--keep-split", is_flag=True, help="Write as many files as the source has, with the same tensors.")
partial_requant = click.option(
    "--partial-requant", is_flag=True, help="Keep the files of a split that are there already, and write those that are not."
)
remote = click.option(
    "--remote", is_flag=True, help="Read the weights of an hf: repository as they are needed, without downloading its files."
)
delete_source_shards = click.option(
    "--delete-source-shards", is_flag=True, help="DELETE each file of the checkpoint once all its tensors are written."
)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


class OutName(click.Path):
    """A file to write, in a folder that exists: a slip in its name makes no folders."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.name:
            self.fail(f"{os.fsdecode(value)!r} is no file's name", param, ctx)
        if not path.absolute().parent.is_dir():
            self.fail(f"there is no folder {path.parent}; make it first", param, ctx)
        return path


OUT = OutName(path_type=Path)
OUT_FILE = OutName(dir_okay=False, path_type=Path)
imatrix = click.option("--imatrix", type=FILE, help="Importance matrix, GGUF or .dat.")


mla_layout = click.option(
    "--mla-layout",
    type=click.Choice(["ik", "mainline", "legacy"]),
    help="Matrices of DeepSeek's latent attention, of a checkpoint. [default: the recipe's, else ik]",
)
ctx = click.option(
    "-c", "--ctx-size", "n_ctx", type=click.IntRange(4, 2**31 - 1), default=512, show_default=True, help="Window in tokens."
)
chunks = click.option("--chunks", type=click.IntRange(1), help="Read only this many windows.")
target_size = click.option("--target-size", type=SIZE, metavar="SIZE", help="The file's size to stay below (180G, 20GiB).")
target_bpw = click.option("--target-bpw", type=float, metavar="BITS", help="Bits per weight to stay below, over all tensors.")
max_kld = click.option("--max-kld", type=float, metavar="NATS", help="The smallest file with at most this KL divergence.")
types = click.option(
    "--types", metavar="T,T,...", help="Types to choose from; `default` stands for the usual ones. [default: default]"
)


class SourceName(click.ParamType):
    """A path that exists, or hf:OWNER/NAME[@REVISION]."""

    name = "source"

    def __init__(self, **path: Any):
        self.path = click.Path(exists=True, path_type=Path, **path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str | Path:
        if str(value).startswith("hf:") and not Path(value).exists():
            return str(value)
        if not self.path.file_okay and Path(value).is_file():
            self.fail(f"{value} is a file; give a folder, or hf:OWNER/NAME (`quantize` takes GGUFs)", param, ctx)
        return self.path.convert(value, param, ctx)  # type: ignore[return-value]


class TypeName(click.ParamType):
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


TYPE = TypeName()


class FileTypeName(click.ParamType):
    """A file type or a tensor type in any letter case (see `parse_default`), or the number of a file type."""

    name = "type"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> TensorType | str:
        from ...quantize.recipes.mixes import file_type_id, file_types
        from ...quantize.recipes.rules import RecipeError, parse_default

        if value.upper() == "COPY":
            self.fail("COPY is no type; where TYPE is left out, tensors that no rule takes keep theirs", param, ctx)
        if value.isdecimal():
            number, value = value, next((name for name in file_types() if str(file_type_id(name)) == value), None)
            if value is None:
                self.fail(f"there is no file type {number}; give one by its name (threads are given by -t)", param, ctx)
            click.echo(f"note: file type {number} is {value}", err=True)
        try:
            return parse_default(value, "")
        except RecipeError as error:
            self.fail(str(error).removeprefix(": "), param, ctx)


FILE_TYPE = FileTypeName()


def parse_override(text: str) -> tuple[str, Any]:
    """'KEY=TYPE:VALUE', TYPE one of int, float, bool, str, as llama-quantize has it. Raises click.BadParameter."""
    key, _, rest = text.partition("=")
    kind, _, value = rest.partition(":")
    parsers: dict[str, Callable[[str], Any]] = {
        "int": lambda v: np.int32(int(v)),
        "float": lambda v: np.float32(float(v)),
        "bool": lambda v: {"true": True, "false": False}[v],
        "str": str,
    }
    try:
        return key, parsers[kind](value)
    except (KeyError, ValueError, OverflowError):
        raise click.BadParameter(f"{text!r} is not KEY=TYPE:VALUE with TYPE int, float, bool or str") from None


class ListsTypes(click.Command):
    """A command whose help ends with the names of the file types and of the types that tensors can be quantised to."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        from ...quantize import can_encode
        from ...quantize.recipes.mixes import default_type, file_types

        with formatter.section("File types (a mix of types, as llama-quantize makes it)"):
            formatter.write_text(" ".join(name for name in file_types() if can_encode(default_type(name))))
        with formatter.section("Tensor types (in rules, in options, and with --pure)"):
            formatter.write_text(" ".join(name for name in TYPES if can_encode(TYPES[name])))


def _metadata(values: dict[str, Any]) -> dict[str, Any]:
    from ...convert.model_card import file_metadata

    given = file_metadata(values["metadata_file"]) if values["metadata_file"] is not None else {}
    return given | dict(map(parse_override, values["override_kv"]))


# A command gets both as one keyword argument, `override_kv`: a dict of keys to set.
metadata = gathered(
    (
        click.option(
            "--metadata",
            "metadata_file",
            type=FILE,
            metavar="FILE.json",
            help='Metadata to set: {"general.author": "...", ...}. --override-kv beats it.',
        ),
        click.option(
            "--override-kv", multiple=True, metavar="KEY=TYPE:VALUE", help="Set metadata; TYPE is int, float, bool or str."
        ),
    ),
    ("metadata_file", "override_kv"),
    "override_kv",
    _metadata,
)


def _picture(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
    from ...pipeline.reports.plots import check_picture

    if path is not None:
        check_picture(path)
    return path


def plot(what: str) -> Callable[[Callable], Callable]:
    """--plot PNG, looked at before any work. what: the picture shows."""
    kind = click.Path(dir_okay=False, path_type=Path)
    return click.option("--plot", type=kind, metavar="PNG", callback=_picture, help=f"Draw {what} to this file.")
