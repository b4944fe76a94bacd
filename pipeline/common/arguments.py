"""Arguments of the verbs: parsed, refused if they have no effect, and paths of outputs checked before the work is done."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ...errors import PlanError, UsageError
from ...formats import TensorType
from ...formats.file_range import read_text
from ...jobs.patterns import NamePattern, compile_pattern
from ...jobs.plan import parse_size
from ...request_fields import fields_of

Size = int | str  # bytes: a number, or '180G', '20GiB'
TypeName = TensorType | str  # a tensor type, or its name in any case
FileType = TensorType | str  # the same, or the name of a file type such as 'Q4_K_M'
Pattern = str | re.Pattern[str] | NamePattern


def as_bytes(size: Size | None) -> int | None:
    """A size in bytes. Raises PlanError for a text that is none."""
    return parse_size(size) if isinstance(size, str) else size


def as_type(name: TypeName | None, where: str = "") -> TensorType | None:
    """A tensor type. Raises RecipeError, beginning with `where`, for a name that there is not."""
    from ...quantize.recipes.rules import parse_type

    return parse_type(name, where) if isinstance(name, str) else name


def as_file_type(name: FileType | None, where: str = "") -> TensorType | str | None:
    """A tensor type, or the name of a file type as llama-quantize spells it. Raises RecipeError as `as_type`."""
    from ...quantize.recipes.rules import parse_default

    return parse_default(name, where) if isinstance(name, str) else name


def as_pattern(pattern: Pattern, where: str) -> NamePattern:
    """A compiled regular expression. Raises PlanError, beginning with `where`, for a text that is none, and for one with flags,
    which are written into the text: `(?i)`."""
    if isinstance(pattern, NamePattern):
        return pattern
    if isinstance(pattern, str):
        return compile_pattern(pattern, where)
    if pattern.flags != re.compile(pattern.pattern).flags:
        raise PlanError(f"{where}: flags of {pattern.pattern[:200]!r} have to be part of its text, as in (?i)")
    return compile_pattern(pattern.pattern, where)


def as_paths(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """One path or several, as a list."""
    return [Path(paths)] if isinstance(paths, str | Path) else [Path(path) for path in paths]


def as_adapters(lora: str | Path | Sequence[str | Path]) -> tuple[str | Path, ...]:
    """Adapters, FILE or FILE=SCALE, one or several, as a tuple."""
    return (lora,) if isinstance(lora, str | Path) else tuple(lora)


def refuse_unused(request: Any, without: str, *names: str) -> None:
    """Raises UsageError for the first of these fields of a request that has another value than its default: it has no effect.
    without: what is missing."""
    fields = {field.name: field for field in fields_of(type(request))}
    given = {fields[name].flag: value for name in names if (value := getattr(request, name)) != fields[name].default}
    refuse_given({flag: True if flag.startswith("--no-") else value for flag, value in given.items()}, without)


def refuse_given(arguments: Mapping[str, Any], without: str) -> None:
    """Raises UsageError for the first argument that was given: it has no effect.

    arguments: as the command line spells them -> value; None, False and () count as not given. without: what is missing.
    """
    for name, value in arguments.items():
        if value is not None and value is not False and value not in ((), []):
            raise UsageError(f"{name} does nothing without {without}")


def read_template(template: str | Path | None) -> str | None:
    """A chat template as text: the content of a file, or what was given (a name, or a template itself).

    Raises UsageError for a file that is no text, FormatError for a device.
    """
    if template is None or not _is_there(template):
        return str(template) if template is not None else None
    try:
        return read_text(Path(template), pipes=True)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{template} cannot be read as a text: {error}") from None


def _is_there(path: str | Path) -> bool:
    """Whether this is the path of something other than a folder."""
    try:
        return Path(path).exists() and not Path(path).is_dir()
    except OSError:  # a template is longer than a file's name can be
        return False


def refuse_inputs(outputs: Sequence[Path], inputs: Sequence[Path]) -> None:
    """Raises PlanError for an output that the call also reads, whatever `force` says."""
    read = {path.resolve() for path in inputs}
    for path in outputs:
        if path.resolve() in read:
            raise PlanError(f"{path} is an input of this job; choose another output")


def check_new(out: Path, force: bool) -> None:
    """Raises PlanError for an output that exists, without force, and as `check_folder` does."""
    if out.exists() and not force:
        raise PlanError(f"{out} exists; use --force to replace it")
    check_folder(out)


def check_output_space(out: Path, nbytes: int) -> None:
    """Raises PlanError if the output's folder has less free space than it takes."""
    import shutil

    free = shutil.disk_usage(out.absolute().parent).free
    if nbytes > free:
        raise PlanError(f"writing {out} takes {nbytes} bytes; {free} are free in its folder")


def check_folder(out: Path) -> None:
    """Raises PlanError if nothing can be written beside the output."""
    if not os.access(out.absolute().parent, os.W_OK):
        raise PlanError(f"{out.absolute().parent}: not a folder that can be written to")
