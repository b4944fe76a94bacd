"""`ggufmill convert-endian`: a GGUF for machines of the other byte order."""

from __future__ import annotations

import mmap
from dataclasses import replace
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...errors import FormatError, PlanError
from ...formats.byte_order import OTHER, ByteOrder, byte_order, swap_header, swap_values
from ...formats.file_range import check_regular, read_range
from ...formats.gguf import SPLIT_NAME
from ...jobs.atomic_write import atomic_file
from ...jobs.lock import output_lock
from ..common.arguments import check_new, check_output_space, refuse_inputs
from ..common.progress import Stage, reporting
from ..common.shown import shown
from ..requests.files import EndianRequest
from ..requests.verb import verb

_BLOCK = 1 << 24  # bytes at a time, at most; whole blocks of the type


@shown
@dataclass(frozen=True)
class EndianResult:
    """status: 'planned' (dry_run) or 'written'; order: the byte order of the output, `file`; tensors, nbytes: what it holds."""

    status: str
    file: Path
    order: ByteOrder
    tensors: int
    nbytes: int

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {**vars(self), "file": str(self.file)}


@verb(EndianRequest)
def convert_endian(request: EndianRequest) -> EndianResult:
    """Writes a GGUF with the bytes of every number reversed: a little-endian file becomes a big-endian one, and the reverse.

    Returns an `EndianResult`. Raises FormatError for a file that is damaged, PlanError for types that have no agreed form on
    big-endian machines, MillError if it cannot be written.

    Example:
        >>> from ggufmill import convert_endian, convert_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> convert_endian("demo.gguf", "demo-be.gguf", force=True).order
        'big'
    """
    path, target = Path(request.file), Path(request.out)
    if SPLIT_NAME.match(path.name):
        raise PlanError(f"{path} is a file of a split model; `ggufmill merge` it first")
    check_regular(path)
    try:
        with path.open("rb") as opened, mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
            order = byte_order(path, mapped[:8])
            with memoryview(mapped) as data:
                swapped = swap_header(path, data, order)
    except (OSError, ValueError) as error:
        raise FormatError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    refuse_inputs([target], [path])
    check_new(target, request.force)
    nbytes = path.stat().st_size
    check_output_space(target, nbytes)
    result = EndianResult("planned", target, OTHER[order], len(swapped.names), nbytes)
    if request.dry_run:
        return result
    with output_lock(target), reporting(request.progress) as report, atomic_file(target) as output:
        stage = Stage(report, "convert-endian", nbytes)
        output.write(swapped.header)
        for name, kind, offset, size in swapped.located():
            output.write(bytes(offset - output.tell()))  # padding before the tensor
            step = _BLOCK // kind.block_bytes * kind.block_bytes
            for start in range(offset, offset + size, step):
                output.write(swap_values(read_range(path, start, min(step, offset + size - start)), kind).data)
                stage.reach(output.tell(), item=name)
        output.write(bytes(nbytes - output.tell()))
        stage.reach(nbytes)
    return replace(result, status="written")
