"""`ggufmill inspect` shows what is in a file."""

from __future__ import annotations

from math import prod
from pathlib import Path
from typing import Any

import click
import numpy as np

from ..formats import GGUFFile, MillError, TensorInfo, open_gguf
from ..formats.file_range import range_checksum
from ..formats.gguf import VERSION
from ..formats.gguf_header import value_type
from ..pipeline.console import byte_progress, emit, gib, table
from .options import flags


@click.command(short_help="Show what a model file holds")
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Decode every tensor and count NaN and infinite values.")
@click.option("--checksums", is_flag=True, help="xxh3-64 of every tensor's bytes.")
@click.option("--arrays", is_flag=True, help="Long arrays in full in --json; else their first values and their length.")
@flags.as_json
def command(file: Path, check: bool, checksums: bool, arrays: bool, as_json: bool) -> None:
    """Metadata, tensors, types and sizes of a GGUF file (give any shard of a split one). Unknown types are shown by number.

    \b
    Examples:
      ggufmill inspect model.gguf
      ggufmill inspect model-00001-of-00009.gguf --check --json
      ggufmill inspect model.gguf --json --arrays
    """
    opened = open_gguf(file)
    described = [_describe(info) for info in opened.tensors.values()]
    total = sum(t["nbytes"] for t in described)
    if check or checksums:
        with byte_progress(total, "inspect") as progress:
            for info, entry in zip(opened.tensors.values(), described, strict=True):
                if checksums:
                    entry["xxh3"] = range_checksum(info.path, info.offset, info.nbytes)
                if check:
                    entry["nonfinite"] = _nonfinite(info)
                progress(info.nbytes, _printable(info.name))
    elements = sum(t["n_elements"] for t in described)
    sizes = [p.stat().st_size for p in opened.paths]
    summary = {
        "files": [str(p) for p in opened.paths],
        "file_nbytes": sizes,
        "file_bytes": sum(sizes),
        "gguf_version": VERSION,
        "alignment": opened.alignment,
        "architecture": opened.architecture,
        "metadata": {key: _plain(value, arrays and as_json) for key, value in opened.metadata.items()},
        "metadata_types": {key: value_type(key, value) for key, value in opened.metadata.items()},
        "tensors": described,
        "types": _histogram(described),
        "parameters": elements,
        "total_bytes": total,
        "bits_per_weight": total * 8 / elements if elements else 0.0,
    }
    emit(summary, as_json, lambda: _text(opened, summary))
    damaged = [t["name"] for t in described if t.get("nonfinite")]
    if damaged:
        raise MillError(f"{len(damaged)} tensors hold NaN or infinite values, the first is {damaged[0]}")


def _describe(info: TensorInfo) -> dict[str, Any]:
    return {
        "name": info.name,
        "shape": list(info.shape),
        "type": info.type.name,
        "file": info.path.name,
        "offset": info.offset,
        "nbytes": info.nbytes,
        "n_elements": prod(info.shape),
    }


def _histogram(described: list[dict[str, Any]]) -> dict[str, dict[str, int]]:
    """type -> tensors and bytes, most bytes first."""
    types: dict[str, dict[str, int]] = {}
    for t in described:
        entry = types.setdefault(t["type"], {"tensors": 0, "nbytes": 0})
        entry["tensors"], entry["nbytes"] = entry["tensors"] + 1, entry["nbytes"] + t["nbytes"]
    return dict(sorted(types.items(), key=lambda item: -item[1]["nbytes"]))


def _nonfinite(info: TensorInfo) -> int | None:
    """NaN and infinite values of a tensor; None for a type that cannot be decoded."""
    from ..quantize import can_encode, decode

    if not info.type.is_known or not can_encode(info.type):
        return None
    step = max(info.type.rows, (1 << 22) // info.shape[0] // info.type.rows * info.type.rows)
    rows = (info.read(start, min(start + step, info.n_rows)) for start in range(0, info.n_rows, step))
    return sum(int(np.count_nonzero(~np.isfinite(decode(q, info.type.name, info.shape[0])))) for q in rows)


def _plain(value: Any, full: bool = False) -> Any:
    """A metadata value as JSON has it; long arrays are cut to their first values and their length, unless `full`."""
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, list) and len(value) > 16 and not full:
        return {"length": len(value), "first": _plain(value[:8])}
    return [_plain(v, full) for v in value] if isinstance(value, list) else value


def _text(opened: GGUFFile, summary: dict[str, Any]) -> str:
    metadata = [(_printable(key), _short(value)) for key, value in summary["metadata"].items()]
    extra = [key for key in ("xxh3", "nonfinite") if key in (summary["tensors"] or [{}])[0]]
    tensors = [
        (_printable(t["name"]), " x ".join(map(str, t["shape"])), t["type"], t["nbytes"], *(t[key] for key in extra))
        for t in summary["tensors"]
    ]
    histogram = [(name, entry["tensors"], gib(entry["nbytes"])) for name, entry in summary["types"].items()]
    shards = f" in {opened.n_splits} files" if opened.n_splits > 1 else ""
    return "\n\n".join(
        [
            table(("key", "value"), metadata),
            table(("tensor", "shape", "type", "bytes", *extra), tensors),
            table(("type", "tensors", "size"), histogram),
            f"{len(tensors)} tensors, {gib(summary['total_bytes'])}, {summary['bits_per_weight']:.3f} bits per weight{shards}",
        ]
    )


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return f"[{value['length']:,}] {', '.join(repr(v) for v in value['first'][:5])}, ..."
    text = _printable(str(value)[:81])
    return text if len(text) <= 80 else text[:77] + "..."


def _printable(text: str) -> str:
    """With escapes for what a terminal would act on or could not show: names and values are whatever the file says."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
