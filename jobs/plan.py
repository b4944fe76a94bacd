"""The plan of a job: every byte of the output's layout, decided before any tensor is read.

convert, quantize and repack each make one; `jobs.execute` carries it out. The header is complete, and each tensor has its type,
the rule that chose it, its offset and its size.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property, partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from ..data_classes import dataclass
from ..errors import PlanError
from ..formats.gguf import PLAN_KEY, SPLIT_NAME, GGUFFile
from ..formats.gguf_header import header_bytes, header_layout
from ..formats.gguf_parser import DEFAULT_ALIGNMENT
from ..formats.types import TensorType
from .outputs import Locations, Output, OutputKind, Outputs
from .streamed_json import StreamedJson


@dataclass(frozen=True)
class PlannedFile:
    """One file of the output, and its size in bytes.

    make_header  makes its header: with a million tensors it is large, and most plans are only looked at
    """

    path: Path
    nbytes: int
    make_header: Callable[[], bytes] = field(repr=False, compare=False)

    @property
    def header(self) -> bytes:
        """Complete, padded to the alignment; made each time."""
        return self.make_header()

    @property
    def part(self) -> Path:
        """Its name until it is complete."""
        return self.path.with_name(self.path.name + ".part")


@dataclass(frozen=True)
class Plan(StreamedJson):
    """What a job writes.

    outputs      the tensors in file order; `locations` has one entry for each
    files        one, or the shards of a split model
    metadata     of the model, without split.* keys
    make_fingerprint  what `fingerprint` calls: most plans are only looked at
    warnings     for the user, one line each
    covariance_bytes  of memory that is needed for covariances while rows are made
    replaced     gets (tensor, weights) of weights that are not finite and are written as 0, as rows are made; None: they are
                 errors
    """

    outputs: Outputs
    locations: Locations
    files: list[PlannedFile]
    metadata: dict[str, Any] = field(repr=False)
    make_fingerprint: Callable[[], str] = field(repr=False, compare=False)
    warnings: list[str] = field(default_factory=list)
    replaced: list[tuple[str, int]] | None = field(default=None, repr=False, compare=False)
    covariance_bytes: int = field(default=0, compare=False)

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything that decides the output's bytes; a resumed job has to have the same."""
        return self.make_fingerprint()

    @property
    def total_bytes(self) -> int:
        """Bytes of tensor data, without headers and padding."""
        return self.outputs.total_bytes

    @property
    def file_bytes(self) -> int:
        """Bytes of all files, headers and padding included."""
        return self.missing_bytes(())

    def missing_bytes(self, existing: Collection[int]) -> int:
        """Of all files but these, by their indexes."""
        return sum(file.nbytes for i, file in enumerate(self.files) if i not in existing)

    @property
    def bits_per_weight(self) -> float:
        """Average over all elements, without headers and padding."""
        return self.outputs.bits_per_weight

    def histogram(self) -> dict[str, tuple[int, int]]:
        """type name -> (number of tensors, bytes), most bytes first."""
        counts: dict[str, tuple[int, int]] = {}
        for kind, more in self.outputs.counts():
            n, size = counts.get(kind.type.name, (0, 0))
            counts[kind.type.name] = (n + more, size + kind.nbytes * more)
        return dict(sorted(counts.items(), key=lambda item: -item[1][1]))

    def json_fields(self) -> dict[str, Any]:
        return {
            "files": [{"path": str(f.path), "nbytes": f.nbytes} for f in self.files],
            "tensors": self._described(),
            "types": {name: {"tensors": n, "nbytes": size} for name, (n, size) in self.histogram().items()},
            "total_bytes": self.total_bytes,
            "file_bytes": self.file_bytes,
            "bits_per_weight": self.bits_per_weight,
            "warnings": self.warnings,
        }

    def _described(self) -> Iterator[dict[str, Any]]:
        for (name, kind), location in zip(self.outputs.entries(), self.locations, strict=True):
            yield {
                "name": name,
                "shape": list(kind.shape),
                "source_type": kind.source_type,
                "type": kind.type.name,
                "rule": kind.rule,
                "note": kind.note,
                "file": location.file,
                "offset": location.offset,
                "nbytes": kind.nbytes,
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
    replaced: list[tuple[str, int]] | None = None,
) -> Plan:
    """The plan of one file, or of shards NAME-00001-of-0000N.gguf (as gguf-split names them).

    identity            whatever else decides the bytes (the source's digest, the imatrix, options); part of the fingerprint
    content             what decides the bytes other than headers, and is the same on every machine that plans this: every shard
                        then holds a digest of the plan, which shards of another plan lack; None: it does not
    split_max_size      bytes per shard at most; split_max_tensors: tensors per shard at most
    tensor_first_split  False: the first shard holds only the metadata
    always_split        a single shard is named and marked as one too, as gguf-split does it
    shards              tensor name -> number of its shard, counted from 0, for the split of another file; a tensor that is
                        not in it goes where the one before it went
    warnings, replaced  of the `Plan`

    Raises PlanError when a single tensor exceeds split_max_size, for contradictory split options, and for the name of a part,
    of a journal, or of one of several shards, in the place of a whole model's.
    """
    path, outputs = Path(path), Outputs.of(outputs)
    alignment = _alignment(metadata)
    is_split = split_max_size is not None or split_max_tensors is not None
    if shards is not None:
        if is_split or not tensor_first_split:
            raise PlanError("the shards are to be as in the source, so no size, number or first shard can be asked for")
        firsts = _firsts_of_shards(outputs, shards)
    elif is_split or tensor_first_split:
        first_header = header_layout(metadata, [], alignment)[0] if is_split else 0
        firsts = _firsts_by_limits(outputs, alignment, first_header, split_max_size, split_max_tensors, tensor_first_split)
    else:
        raise PlanError("a first shard without tensors is for a split output: say of what size or how many tensors")
    files: list[PlannedFile] = []
    counts = np.diff([*firsts, len(outputs)])
    locations = Locations(np.repeat(np.arange(len(firsts)), counts), np.empty(len(outputs), np.int64))
    in_shards, mark = len(firsts) > 1 or always_split, {}
    if in_shards and content is not None:
        mark = {PLAN_KEY: _plan_digest(outputs, locations.files, metadata, content)}
    for number, (start, stop) in enumerate(pairwise([*firsts, len(outputs)])):
        keys, file_path = metadata, path
        if in_shards:
            # As gguf-split does it: the first shard has the model's metadata, the others only what is needed to read them.
            split = {
                "split.no": np.uint16(number),
                "split.count": np.uint16(len(firsts)),
                "split.tensors.count": np.int32(len(outputs)),
                **mark,
            }
            alignment_key = {k: v for k, v in metadata.items() if k == "general.alignment"}
            keys = {**metadata, **split} if number == 0 else alignment_key | split
            stem = path.name.removesuffix(".gguf")
            file_path = path.with_name(f"{stem}-{number + 1:05d}-of-{len(firsts):05d}.gguf")
        else:
            _check_name(path)
        keys = dict(keys)
        _, locations.offsets[start:stop], size = header_layout(keys, _entries(outputs, start, stop), alignment)
        files.append(PlannedFile(file_path, size, partial(_header, keys, outputs, start, stop, alignment)))
    make_fingerprint = partial(_fingerprint, identity, files, outputs)
    return Plan(outputs, locations, files, metadata, make_fingerprint, warnings or [], replaced)


def _check_name(path: Path) -> None:
    """Raises PlanError for a name under which nothing would take a file for a whole model."""
    if path.name.endswith((".part", ".journal")):
        raise PlanError(f"{path} has the name of a file of an unfinished job; choose another output")
    split = SPLIT_NAME.match(path.name)
    if split is not None and int(split["count"]) != 1:
        raise PlanError(f"{path} has the name of one of {int(split['count'])} files of a split model; choose another output")


def _entries(outputs: Outputs, start: int, stop: int) -> Iterator[tuple[str, tuple[int, ...], TensorType]]:
    return ((name, kind.shape, kind.type) for name, kind in outputs.entries(start, stop))


def _header(metadata: dict[str, Any], outputs: Outputs, start: int, stop: int, alignment: int) -> bytes:
    """The header of a file with the outputs from `start` to `stop`."""
    return header_bytes(metadata, _entries(outputs, start, stop), alignment)[0]


def _fingerprint(identity: str, files: Sequence[PlannedFile], outputs: Outputs) -> str:
    digest = hashlib.sha256(identity.encode())
    for file in files:
        digest.update(file.header)
    for name, kind in outputs.entries():
        digest.update(f"{name}\0{kind.source_type}\0{kind.rule}\0{kind.note}\n".encode())
    return digest.hexdigest()[:32]


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
    outputs = Outputs(lambda name, kind: file.tensors[name].read)
    for info in file.tensors.values():
        if not info.type.is_known:
            raise PlanError(f"{info.path}: tensor {info.name} is of unknown {info.type.name}; it cannot be copied")
        outputs.add(info.name, OutputKind(info.shape, info.type.name, info.type, "kept"))
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


def _plan_digest(outputs: Outputs, files: np.ndarray, metadata: dict[str, Any], content: str) -> str:
    """A digest of what decides the bytes of a split, so far as it is the same on every machine: no path, no file's time.
    files: the number of each tensor's, int64 [n]."""
    digest = hashlib.sha256(content.encode() + header_bytes(metadata, [], DEFAULT_ALIGNMENT)[0])
    for number, (name, kind) in zip(files.data, outputs.entries(), strict=True):
        digest.update(f"{number}\0{name}\0{kind.shape}\0{kind.source_type}\0{kind.type.name}\n".encode())
    return digest.hexdigest()[:32]


def _alignment(metadata: dict[str, Any]) -> int:
    """general.alignment. Raises PlanError for a value that readers do not accept."""
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    is_integer = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    if not is_integer or not 8 <= value <= 1 << 16 or int(value) & (int(value) - 1):
        raise PlanError(f"general.alignment is {value!r}; it has to be a power of two from 8 to 65536")
    return int(value)


_SHARD_KEYS = 256  # bytes; more than the metadata of any shard but the first


def _firsts_of_shards(outputs: Outputs, shards: Mapping[str, int]) -> list[int]:
    """The place of each shard's first output in a given split. Raises PlanError if that would change the tensors' order."""
    counts, number = [0] * (max(shards.values(), default=0) + 1), 0
    for name in outputs.names:
        before, number = number, shards.get(name, number)
        if number < before:
            raise PlanError("the source's shards do not hold its tensors in order; its split cannot be kept")
        counts[number] += 1
    return [0, *accumulate(counts[:-1])]


def _firsts_by_limits(
    outputs: Outputs,
    alignment: int,
    first_header: int,
    max_size: int | None,
    max_tensors: int | None,
    tensor_first: bool,
) -> list[int]:
    """The place of the first output of each shard; no file, its header included, exceeds max_size bytes or max_tensors."""
    firsts = [0] if tensor_first else [0, 0]
    if max_size is None and max_tensors is None:
        return firsts
    size = first_header + _SHARD_KEYS if tensor_first else _SHARD_KEYS + alignment
    for number, (name, kind) in enumerate(outputs.entries()):
        header_entry = len(name.encode()) + 24 + 8 * len(kind.shape)  # of the header
        needed = -(-kind.nbytes // alignment) * alignment + header_entry
        if max_size is not None and needed + _SHARD_KEYS > max_size:
            raise PlanError(f"tensor {name} alone takes {needed} bytes, more than the {max_size} allowed per file")
        is_full = (max_size is not None and size + needed > max_size) or (
            max_tensors is not None and number - firsts[-1] >= max_tensors
        )
        if is_full and (number > firsts[-1] or len(firsts) == 1):
            firsts.append(number)
            size = _SHARD_KEYS + alignment
        size += needed
    return firsts


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
    """Text such as '50G' (10^9, as in convert_hf_to_gguf.py) or '50GiB' (2^30) -> bytes.

    Raises PlanError, also for a number of less than 1 MiB without a unit: who writes 3.2 does not mean three bytes.
    """
    match = re.fullmatch(r"\s*([\d.]+)\s*([KMGT]?I?)(B?)\s*", text, re.IGNORECASE)
    try:
        if match is None:
            raise ValueError
        size = int(float(match[1]) * _UNITS[match[2].upper()])
    except (ValueError, KeyError, OverflowError):
        raise PlanError(f"{text!r} is not a size; write for example 50G or 512MiB") from None
    if size <= 0:
        raise PlanError(f"a size of {text!r} is too small")
    if size < 1 << 20 and not match[2] and not match[3]:
        raise PlanError(f"{text} is a number of bytes, for a size in other units write {text}GiB or {text}MiB")
    return size
