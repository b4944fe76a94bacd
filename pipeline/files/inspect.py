"""`ggufmill inspect`: what a GGUF file holds, and what the processor can do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...errors import CheckFailed, UsageError
from ...formats import TensorInfo, open_gguf
from ...formats.file_range import range_checksum
from ...formats.gguf import GGUFFile
from ...formats.gguf_header import value_type
from ...formats.gguf_parser import VERSION
from ...formats.loader_facts import LoaderTensor
from ...formats.loaders import loader_differences, loader_problems
from ...formats.source import LOST_CONFIG
from ...formats.string_array import StringArray
from ...formats.types import FILE_TYPES_OF_TWO_MEANINGS
from ...jobs.streamed_json import StreamedJson
from ...quantize.recipes.type_selection import Selection
from ..common.arguments import Pattern, as_pattern
from ..common.checkpoints import CheckpointSummary, summarize_checkpoint
from ..common.progress import Stage, reporting
from ..common.rows import Rows, type_histogram
from ..common.shown import shown
from ..common.type_rules import type_rules
from ..requests.files import InspectRequest
from ..requests.verb import verb

_SHOWN = 16  # values of an array that are listed in full
_FIRST = 8  # values of a longer one
_CHECKED = 1 << 22  # elements that are decoded at a time


@shown
@dataclass
class InspectResult(StreamedJson):
    """Metadata, tensors, types and sizes of a GGUF file, all its shards together.

    files, file_nbytes  paths of the shards, and their sizes; file_bytes: the sum
    metadata            key -> value; a long array as {'length': ..., 'first': [...]} unless all was asked for
    metadata_types      key -> type of the value in the file, such as 'uint32' or 'array of string'
    tensors             name, shape (in ne order, row length first), type, bits per weight, rule, note, file, offset (from the
                        file's start), nbytes and n_elements of each; xxh3 and nonfinite if they were asked for. rule: of the
                        recipe or stock mix, that gave it the type; note: why it is a fallback; None where the file does not
                        tell
    n_tensors           tensors of the file, of which `tensors` has those that were asked for
    types               type -> tensors and nbytes, most bytes first
    parameters          elements of all tensors; total_bytes: their bytes; bits_per_weight follows
    notes               what the metadata may mislead about, one line each
    problems            why the program that was asked for does not load the file, one line each
    """

    files: list[Path]
    file_nbytes: list[int]
    gguf_version: int
    alignment: int
    architecture: str
    metadata: dict[str, Any]
    metadata_types: dict[str, str]
    tensors: Sequence[dict[str, Any]]
    types: dict[str, dict[str, int]]
    parameters: int
    total_bytes: int
    notes: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    n_tensors: int = 0

    @property
    def file_bytes(self) -> int:
        return sum(self.file_nbytes)

    @property
    def bits_per_weight(self) -> float:
        return self.total_bytes * 8 / self.parameters if self.parameters else 0.0

    def json_fields(self) -> dict[str, Any]:
        """What --json prints: the fields, with file_bytes and bits_per_weight."""
        return {
            "files": [str(path) for path in self.files],
            "file_nbytes": self.file_nbytes,
            "file_bytes": self.file_bytes,
            "gguf_version": self.gguf_version,
            "alignment": self.alignment,
            "architecture": self.architecture,
            "metadata": self.metadata,
            "metadata_types": self.metadata_types,
            "tensors": iter(self.tensors),
            "n_tensors": self.n_tensors,
            "types": self.types,
            "parameters": self.parameters,
            "total_bytes": self.total_bytes,
            "bits_per_weight": self.bits_per_weight,
            "notes": self.notes,
            "problems": self.problems,
        }


@verb(InspectRequest)
def inspect_model(request: InspectRequest) -> InspectResult:
    """Reads metadata, tensors, types and sizes of a GGUF file. Unknown types are named by number.

    Returns an `InspectResult`. Raises FormatError for a file that is damaged, CheckFailed when `check` finds such values or
    `program` does not load the file.

    Example:
        >>> from ggufmill import convert_model, inspect_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> result = inspect_model("demo.gguf")
        >>> result.architecture, result.metadata["deepseek2.block_count"], result.tensors[0]["shape"]
        ('deepseek2', 4, [256, 1536])
    """
    opened = open_gguf(Path(request.file))
    chosen, rules = _chosen(opened, request.tensors), type_rules(opened)
    asked = {"xxh3": request.checksums, "nonfinite": request.check}
    found: dict[str, dict[str, Any]] = {key: {} for key in asked if asked[key]}  # name -> what reading a tensor's data gave

    def describe(info: TensorInfo) -> dict[str, Any]:
        return _describe(info, rules.get(info.name)) | {k: v[info.name] for k, v in found.items() if info.name in v}

    tensors = Rows(chosen, describe)
    types = type_histogram(Rows(opened.tensors, lambda info: _describe(info, None)))
    total = sum(entry["nbytes"] for entry in types.values())
    if request.check or request.checksums:
        with reporting(request.progress) as report:
            stage = Stage(report, "inspect", sum(info.nbytes for info in chosen.values()))
            for info in chosen.values():
                if request.checksums:
                    found["xxh3"][info.name] = range_checksum(info.path, info.offset, info.nbytes)
                if request.check:
                    found["nonfinite"][info.name] = _count_nonfinite(info)
                stage.advance(info.nbytes, info.name)
    result = InspectResult(
        files=opened.paths,
        file_nbytes=[path.stat().st_size for path in opened.paths],
        gguf_version=VERSION,
        alignment=opened.alignment,
        architecture=opened.architecture,
        metadata=plain_metadata(opened.metadata, request.arrays),
        metadata_types={key: value_type(key, value) for key, value in opened.metadata.items()},
        tensors=tensors,
        types=types,
        parameters=sum(prod(info.shape) for info in opened.tensors.values()),
        total_bytes=total,
        n_tensors=len(opened.tensors),
    )
    result.notes = _notes(opened.metadata, result.types)
    if request.program is not None:
        headers = {name: LoaderTensor(tuple(info.shape), info.type) for name, info in opened.tensors.items()}
        result.problems = loader_problems(opened.metadata, headers, request.program)
        result.notes += [
            f"in {request.program} {line}" for line in loader_differences(opened.metadata, headers, request.program)
        ]
    damaged = [name for name, count in found.get("nonfinite", {}).items() if count]
    if damaged:
        raise CheckFailed(f"{len(damaged)} tensors hold NaN or infinite values, the first is {damaged[0]}", result)
    if result.problems:
        raise CheckFailed(f"{request.program} does not load {request.file}: {'; '.join(result.problems)}", result)
    return result


def inspect_checkpoint(source: str | Path) -> CheckpointSummary:
    """Reads config.json and the headers of a checkpoint's weights, as they are stored, and whether `convert_model` takes it.

    source  a folder, or hf:OWNER/NAME[@REVISION], of which no weights are downloaded

    Returns a `CheckpointSummary`. Raises FormatError for a folder without config.json and for damaged files.

    Example:
        >>> from ggufmill import inspect_checkpoint
        >>> from ggufmill.recipes import FOLDER
        >>> summary = inspect_checkpoint(FOLDER / "demo")
        >>> summary.gguf_architecture, summary.config["num_hidden_layers"]
        ('deepseek2', 4)
    """
    return summarize_checkpoint(source)


def _chosen(opened: GGUFFile, pattern: Pattern | None) -> Mapping[str, TensorInfo]:
    """The tensors with a pattern in their names. Raises UsageError if there is none."""
    if pattern is None:
        return opened.tensors
    compiled = as_pattern(pattern, "--tensors")
    chosen = {name: info for name, info in opened.tensors.items() if compiled.search(name)}
    if not chosen:
        raise UsageError(f"--tensors: no tensor of {opened.paths[0]} has {compiled.text!r} in its name")
    return chosen


def _describe(info: TensorInfo, selection: Selection | None) -> dict[str, Any]:
    elements = prod(info.shape)
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type.name,
        "bits": info.nbytes * 8 / elements if elements else 0.0,
        "rule": selection.rule if selection is not None else None,
        "note": (selection.note or None) if selection is not None else None,
        "file": info.path.name,
        "offset": info.offset,
        "nbytes": info.nbytes,
        "n_elements": elements,
    }


def _notes(metadata: dict[str, Any], types: dict[str, dict[str, int]]) -> list[str]:
    """Notes on what converting left out, and on a general.file_type that stands for two things."""
    notes = [f"left out when this file was converted: {line}" for line in metadata.get(LOST_CONFIG, [])]
    number = metadata.get("general.file_type")
    meanings = FILE_TYPES_OF_TWO_MEANINGS.get(int(number)) if isinstance(number, (int, np.integer)) else None
    if meanings is None:
        return notes
    return [*notes, f"general.file_type {number} is {meanings}; most bytes of this file are {next(iter(types), 'of no type')}"]


def _count_nonfinite(info: TensorInfo) -> int | None:
    """NaN and infinite values of a tensor; None for a type that cannot be decoded."""
    from ...quantize import can_encode, decode

    if not info.type.is_known or not can_encode(info.type):
        return None
    step = max(info.type.rows, _CHECKED // info.shape[0] // info.type.rows * info.type.rows)
    rows = (info.read(start, min(start + step, info.n_rows)) for start in range(0, info.n_rows, step))
    return sum(int(np.count_nonzero(~np.isfinite(decode(q, info.type.name, info.shape[0])))) for q in rows)


def plain_metadata(metadata: Mapping[str, Any], full: bool = False) -> dict[str, Any]:
    """Metadata as JSON has them, as `plain_value` makes them."""
    return {key: plain_value(value, full) for key, value in metadata.items()}


def plain_value(value: Any, full: bool = False) -> Any:
    """A metadata value as JSON has it; long arrays are cut to their first values and their length, unless `full`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list | StringArray) and len(value) > _SHOWN and not full:
        return {"length": len(value), "first": plain_value(value[:_FIRST])}
    return [plain_value(v, full) for v in value] if isinstance(value, list | StringArray) else value


@shown
@dataclass(frozen=True)
class ProcessorSummary:
    """What the processor can do, and what kernels make use of.

    processor, architecture  its name as the system gives it, and x86 or arm
    levels                   levels of instructions that it can execute; level: the one in use
    pretended                whether the environment (GGUFMILL_CPU) asks for that level
    compiled_for             processor name that LLVM compiles for; vector_bits: width of its vector registers
    features                 instruction sets in use
    instructions             operation -> the instruction that kernels use for it
    kernels                  folder of compiled kernels
    """

    processor: str
    architecture: str
    levels: list[str]
    level: str
    pretended: bool
    compiled_for: str
    vector_bits: int
    features: list[str]
    instructions: dict[str, str]
    kernels: str

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return asdict(self)


def inspect_processor() -> ProcessorSummary:
    """What the processor can do, and what kernels make use of. Raises MillError for a GGUFMILL_CPU that it cannot execute.

    Example:
        >>> from ggufmill import inspect_processor
        >>> summary = inspect_processor()
        >>> summary.level in summary.levels
        True
    """
    from ...simd.cpu_summary import cpu_summary

    return ProcessorSummary(**cpu_summary())
