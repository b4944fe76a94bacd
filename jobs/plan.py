"""The plan of a job: every byte of the output's layout, decided before any tensor is read.

convert, quantize and repack each make one; `jobs.execute` carries it out. The header is complete, and each tensor has its type,
the rule that chose it, its offset and its size.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import PlanError
from ..formats.gguf import DEFAULT_ALIGNMENT, PLAN_KEY, GGUFFile
from ..formats.gguf_header import header_bytes
from ..formats.source import TensorScale
from ..formats.types import TensorType


@dataclass(frozen=True, slots=True)
class Output:
    """One tensor to be written: what it becomes, why, and how its bytes are made.

    name         in the GGUF
    shape        in ne order: shape[0] is the row length
    source_type  what it is made from: a ggml type name, or a float format such as 'f8_e4m3'
    type         what it becomes
    rule         what chose the type: a recipe line, a flag, 'kept', ...
    produce      (start, stop) -> uint8 [stop - start, row_bytes], the encoded rows; rows count through shape[1:], flattened.
                 It is called for runs that cross no matrix and, for an interleaved type, hold complete groups of rows
    note         the fallback that was taken, or why there is no importance; '' if there is nothing to say
    scale        factors that the encoded rows lack; they are outputs of their own (see quantize.tensor_scale)
    """

    name: str
    shape: tuple[int, ...]
    source_type: str
    type: TensorType
    rule: str
    produce: Callable[[int, int], np.ndarray] = field(repr=False, compare=False)
    note: str = ""
    scale: TensorScale | None = field(default=None, repr=False, compare=False)

    @property
    def nbytes(self) -> int:
        return self.type.nbytes(self.shape)

    @property
    def n_elements(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True, slots=True)
class Location:
    """Where a tensor goes: the index of its file in the plan, and the byte offset from that file's start."""

    file: int
    offset: int


@dataclass(frozen=True)
class PlannedFile:
    """One file of the output: its complete header (padded to the alignment) and its size in bytes."""

    path: Path
    header: bytes = field(repr=False)
    nbytes: int

    @property
    def part(self) -> Path:
        """Its name until it is complete."""
        return self.path.with_name(self.path.name + ".part")


@dataclass(frozen=True)
class Plan:
    """What a job writes.

    outputs      the tensors in file order; `locations` has one entry for each
    files        one, or the shards of a split model
    metadata     of the model, without split.* keys
    fingerprint  a digest of everything that decides the output's bytes; a resumed job has to have the same
    warnings     for the user, one line each
    """

    outputs: list[Output]
    locations: list[Location]
    files: list[PlannedFile]
    metadata: dict[str, Any] = field(repr=False)
    fingerprint: str
    warnings: list[str] = field(default_factory=list)

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data, without headers and padding."""
        return sum(o.nbytes for o in self.outputs)

    @property
    def file_bytes(self) -> int:
        """Bytes of all files, headers and padding included."""
        return sum(f.nbytes for f in self.files)

    @property
    def bits_per_weight(self) -> float:
        """Average over all elements, without headers and padding."""
        elements = sum(o.n_elements for o in self.outputs)
        return self.total_bytes * 8 / elements if elements else 0.0

    def histogram(self) -> dict[str, tuple[int, int]]:
        """type name -> (number of tensors, bytes), most bytes first."""
        counts: dict[str, tuple[int, int]] = {}
        for o in self.outputs:
            n, size = counts.get(o.type.name, (0, 0))
            counts[o.type.name] = (n + 1, size + o.nbytes)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))

    def as_json(self) -> dict[str, Any]:
        """What `--json` prints."""
        return {
            "files": [{"path": str(f.path), "nbytes": f.nbytes} for f in self.files],
            "tensors": [
                {
                    "name": o.name,
                    "shape": list(o.shape),
                    "source_type": o.source_type,
                    "type": o.type.name,
                    "rule": o.rule,
                    "note": o.note,
                    "file": location.file,
                    "offset": location.offset,
                    "nbytes": o.nbytes,
                }
                for o, location in zip(self.outputs, self.locations, strict=True)
            ],
            "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in self.histogram().items()},
            "total_bytes": self.total_bytes,
            "file_bytes": self.file_bytes,
            "bits_per_weight": self.bits_per_weight,
            "warnings": self.warnings,
        }


def make_plan(
    outputs: Sequence[Output],
    metadata: dict[str, Any],
    path: str | Path,
    *,
    identity: str = "",
    content: str | None = None,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
    always_split: bool = False,
    shards: Mapping[str, int] | None = None,
    warnings: list[str] | None = None,
) -> Plan:
    """The plan of one file, or of shards NAME-00001-of-0000N.gguf (as gguf-split names them).

    identity            whatever else decides the bytes (the source's digest, the imatrix, options); part of the fingerprint
    content             what decides the bytes beside the headers, and is the same on every machine that plans this: every shard
                        then holds a digest of the plan, by which shards of another are told; None: it does not
    split_max_size      bytes per shard at most; split_max_tensors: tensors per shard at most
    tensor_first_split  False: the first shard holds only the metadata
    always_split        a single shard is named and marked as one too, as gguf-split does it
    shards              tensor name -> number of its shard, counted from 0, for the split of another file; a tensor that is
                        not in it goes where the one before it went

    Raises PlanError when a single tensor exceeds split_max_size, and for contradictory split options.
    """
    path = Path(path)
    alignment = _alignment(metadata)
    is_split = split_max_size is not None or split_max_tensors is not None
    if shards is not None:
        if is_split or not tensor_first_split:
            raise PlanError("the shards are to be as in the source, so no size, number or first shard can be asked for")
        groups = _group_by_shard(outputs, shards)
    elif is_split or tensor_first_split:
        first_header = len(header_bytes(metadata, [], alignment)[0]) if is_split else 0
        groups = _group_by_limits(outputs, alignment, first_header, split_max_size, split_max_tensors, tensor_first_split)
    else:
        raise PlanError("a first shard without tensors is for a split output: say of what size or how many tensors")
    files: list[PlannedFile] = []
    locations: list[Location] = []
    mark = {PLAN_KEY: _plan_digest(groups, metadata, content)} if content is not None else {}
    for number, group in enumerate(groups):
        keys, file_path = metadata, path
        if len(groups) > 1 or always_split:
            # As gguf-split does it: the first shard has the model's metadata, the others only what is needed to read them.
            split = {
                "split.no": np.uint16(number),
                "split.count": np.uint16(len(groups)),
                "split.tensors.count": np.int32(len(outputs)),
                **mark,
            }
            alignment_key = {k: v for k, v in metadata.items() if k == "general.alignment"}
            keys = {**metadata, **split} if number == 0 else alignment_key | split
            stem = path.name.removesuffix(".gguf")
            file_path = path.with_name(f"{stem}-{number + 1:05d}-of-{len(groups):05d}.gguf")
        header, offsets, size = header_bytes(keys, ((o.name, o.shape, o.type) for o in group), alignment)
        files.append(PlannedFile(file_path, header, size))
        locations += [Location(number, offset) for offset in offsets]
    digest = hashlib.sha256(identity.encode())
    for file in files:
        digest.update(file.header)
    for o in outputs:
        digest.update(f"{o.name}\0{o.source_type}\0{o.rule}\0{o.note}\n".encode())
    return Plan(list(outputs), locations, files, metadata, digest.hexdigest()[:32], warnings or [])


def plan_copy(
    file: GGUFFile,
    out: str | Path,
    *,
    split_max_size: int | None = None,
    split_max_tensors: int | None = None,
    tensor_first_split: bool = True,
) -> Plan:
    """The plan of a copy of a GGUF model with unchanged tensors, in one file or, given a limit, in shards (see `make_plan`).

    The metadata are the model's without the split.* keys of its old split. Raises PlanError as `make_plan` does, and for a
    tensor of an unknown type, whose size in bytes cannot be known.
    """
    outputs = []
    for info in file.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        outputs.append(Output(info.name, info.shape, info.type.name, info.type, "kept", info.read))
    return make_plan(
        outputs,
        {key: value for key, value in file.metadata.items() if not key.startswith("split.")},
        out,
        identity=file.identity,
        split_max_size=split_max_size,
        split_max_tensors=split_max_tensors,
        tensor_first_split=tensor_first_split,
        always_split=split_max_size is not None or split_max_tensors is not None,
    )


def _plan_digest(groups: Sequence[Sequence[Output]], metadata: dict[str, Any], content: str) -> str:
    """Of what decides the bytes of a split, so far as it is the same on every machine: no path, no file's time."""
    digest = hashlib.sha256(content.encode() + header_bytes(metadata, [], DEFAULT_ALIGNMENT)[0])
    for number, group in enumerate(groups):
        for o in group:
            digest.update(f"{number}\0{o.name}\0{o.shape}\0{o.source_type}\0{o.type.name}\n".encode())
    return digest.hexdigest()[:32]


def _alignment(metadata: dict[str, Any]) -> int:
    """general.alignment. Raises PlanError for a value that readers do not accept."""
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 8 <= value <= 1 << 16 or int(value) & (int(value) - 1):
        raise PlanError(f"general.alignment is {value!r}; it has to be a power of two from 8 to 65536")
    return int(value)


_SHARD_KEYS = 256  # bytes; more than the metadata of any shard but the first


def _group_by_shard(outputs: Sequence[Output], shards: Mapping[str, int]) -> list[list[Output]]:
    """The outputs of each shard of a given split. Raises PlanError if that would change the tensors' order."""
    groups: list[list[Output]] = [[] for _ in range(max(shards.values(), default=0) + 1)]
    number = 0
    for o in outputs:
        number = shards.get(o.name, number)
        groups[number].append(o)
    if [o.name for group in groups for o in group] != [o.name for o in outputs]:
        raise PlanError("the source's shards do not hold its tensors in order; its split cannot be kept")
    return groups


def _group_by_limits(
    outputs: Sequence[Output],
    alignment: int,
    first_header: int,
    max_size: int | None,
    max_tensors: int | None,
    tensor_first: bool,
) -> list[list[Output]]:
    """The outputs of each shard, in order; no file, its header included, exceeds max_size bytes or max_tensors."""
    groups: list[list[Output]] = [[]] if tensor_first else [[], []]
    size = first_header + _SHARD_KEYS if tensor_first else _SHARD_KEYS + alignment
    for o in outputs:
        header_entry = len(o.name.encode()) + 24 + 8 * len(o.shape)  # of the header
        needed = -(-o.nbytes // alignment) * alignment + header_entry
        if max_size is not None and needed + _SHARD_KEYS > max_size:
            raise PlanError(f"tensor {o.name} alone takes {needed} bytes, more than the {max_size} allowed per file")
        is_full = (max_size is not None and size + needed > max_size) or (
            max_tensors is not None and len(groups[-1]) >= max_tensors
        )
        if is_full and (groups[-1] or len(groups) == 1):
            groups.append([])
            size = _SHARD_KEYS + alignment
        groups[-1].append(o)
        size += needed
    return groups


_UNITS = {
    "": 1,
    "K": 1000,
    "M": 1000**2,
    "G": 1000**3,
    "T": 1000**4,
    "KI": 1 << 10,
    "MI": 1 << 20,
    "GI": 1 << 30,
    "TI": 1 << 40,
}


def parse_size(text: str) -> int:
    """Text such as '50G' (10^9, as in convert_hf_to_gguf.py) or '50GiB' (2^30) -> bytes. Raises PlanError."""
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)B?\s*", text, re.IGNORECASE)
    try:
        if match is None:
            raise ValueError
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    except (ValueError, KeyError, OverflowError):
        raise PlanError(f"{text!r} is not a size; write for example 50G or 512MiB") from None
    if size <= 0:
        raise PlanError(f"a size of {text!r} is too small")
    return size
