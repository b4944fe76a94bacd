"""`ggufmill export`: a GGUF becomes a Hugging Face checkpoint."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import field, replace
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from ..convert import open_source
from ..convert.export.checkpoint_tensors import (
    DTYPES,
    CheckpointTensor,
    checkpoint_tensors,
    fill,
    main_type,
    narrowed,
)
from ..convert.export.facts import plain
from ..convert.export.find_config import ConfigDifference, FoundConfig, find_config
from ..convert.export.folder_files import folder_files
from ..data_classes import dataclass
from ..errors import FormatError, MillError, PlanError
from ..formats import TensorSource
from ..formats.safetensors_shards import INDEX, ShardLayout, ShardTensor, index_json, lay_out
from ..jobs.atomic_write import write_bytes
from ..jobs.lock import output_lock
from ..operating_system.files import reserve_space, sync_folder
from .common.arguments import as_bytes, check_folder, check_output_space
from .common.messages import note
from .common.progress import Stage, reporting
from .common.shown import shown
from .requests.export import ExportRequest
from .requests.verb import verb

# keys of the GGUF that its tensors and this program decide
_OWN = ("general.file_type", "general.quantization_version", "general.quantized_by", "general.size_label", "general.alignment")
_DENSE = re.compile(r"(\d+_Dense)\.(.+)")
_OTHERS = ("split.", "quantize.", "ggufmill.", "general.source.", "general.url", "general.repo_url", "imatrix.")


@shown
@dataclass(frozen=True)
class ExportResult:
    """status: 'planned' (dry_run) or 'written'; folder: the checkpoint, with `files`; architecture: as config.json names it;
    tensors, nbytes: of its weights; dtype: of most of them; lost: what converting it again would not give, a line each."""

    status: str
    folder: Path
    architecture: str
    tensors: int
    nbytes: int
    dtype: str
    files: list[Path] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {**vars(self), "folder": str(self.folder), "files": [str(path) for path in self.files]}


@verb(ExportRequest)
def export_model(request: ExportRequest) -> ExportResult:
    """Writes the Hugging Face checkpoint of a GGUF: config.json, tokenizer, model card, safetensors.

    Returns an `ExportResult`. Raises FormatError for a GGUF whose tensors no known checkpoint has, PlanError for an output that
    is there already, MillError if it cannot be written.

    Example:
        >>> from ggufmill import convert_model, export_model
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> result = export_model("demo.gguf", "demo-hf", dry_run=True)
        >>> result.architecture, result.dtype
        ('DeepseekV3ForCausalLM', 'bfloat16')
    """
    out = Path(request.out)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PlanError(f"{out} exists; a checkpoint is written to a new folder, or an empty one")
    check_folder(out)
    path = Path(request.source)
    if path.is_dir() or path.suffix != ".gguf":
        raise PlanError(f"{path} is no GGUF file, which is what can be exported")
    source = open_source(path)
    unread = [t for t in source.tensors.values() if t.stored is not None and not t.stored.is_known]
    if unread:
        raise FormatError(f"{path}: {unread[0].name} is {unread[0].source_type}, which cannot be decoded")
    found = find_config(source)
    _check(source, found.difference)
    dtype = DTYPES[main_type(source) if request.outtype == "auto" else request.outtype]
    tensors, values = checkpoint_tensors(source, found.model, dtype)
    entries = [ShardTensor(t.name, t.dtype, t.shape) for t in tensors]
    entries += [ShardTensor(name, "I64" if v.dtype == np.int64 else "F32", v.shape) for name, v in values.items()]
    shards = _files(entries, as_bytes(request.max_shard_size) or 1)
    files = folder_files(source, found, dtype)
    main = [shard for shard in shards if "/" not in shard.name]
    if len(main) > 1:
        files[INDEX] = index_json(main).encode()
    nbytes = sum(entry.nbytes for entry in entries)
    names = [*files, *(shard.name for shard in shards)]
    word = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}[dtype]
    architecture = found.values["architectures"][0]
    result = ExportResult(
        "planned", out, architecture, len(entries), nbytes, word, [out / name for name in names], _lost(found)
    )
    check_output_space(out, nbytes)
    if request.dry_run:
        return result
    part = out.with_name(f"{out.name}.{os.getpid()}.part")
    try:
        with output_lock(out), reporting(request.progress) as report:
            part.mkdir()
            stage = Stage(report, "export", sum(t.n_elements for t in source.tensors.values()), "number")
            _write_tensors(part, source, found, tensors, values, shards, stage)
            for name, data in files.items():
                write_bytes(part / name, data)
            lost = [*result.lost, *_not_given_back(source, part, found)]
            if out.exists():
                out.rmdir()
            part.replace(out)
            sync_folder(out.absolute().parent)
    except OSError as error:
        raise MillError(f"{out} cannot be written: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            shutil.rmtree(part)
    for line in lost:
        note(f"lost: {line}")
    return replace(result, status="written", lost=lost)


def _files(entries: list[ShardTensor], max_bytes: int) -> list[ShardLayout]:
    """The model's shards, and a file of its own in the folder of each dense layer after the pooling (`pooling`)."""
    own = [entry for entry in entries if not _DENSE.match(entry.name)]
    folders: dict[str, list[ShardTensor]] = {}
    for entry in entries:
        match = _DENSE.match(entry.name)
        if match is not None:
            folders.setdefault(match[1], []).append(replace(entry, name=match[2]))
    dense = [replace(lay_out(group, max_bytes)[0], name=f"{folder}/model.safetensors") for folder, group in folders.items()]
    return [*lay_out(own, max_bytes), *dense]


def _check(source: TensorSource, difference: ConfigDifference) -> None:
    """Raises FormatError for tensors that cannot be placed."""
    problems = []
    for names, what in (
        (difference.missing, "have no place in a checkpoint"),
        (difference.absent, "are missing, without which no checkpoint can be made"),
        (difference.misshapen, "have another shape or other values than any config.json gives"),
    ):
        if names:
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            problems.append(f"{len(names)} tensors {what}: {', '.join(names[:3])}{more}")
    if problems:
        raise FormatError(f"{source.path}: {'; '.join(problems)}")


def _lost(found: FoundConfig) -> list[str]:
    """Metadata that no config.json gives."""
    return [f"{key}, which the config.json cannot say" for key in (*found.difference.other, *found.difference.unsaid)]


def _write_tensors(
    folder: Path,
    source: TensorSource,
    found: FoundConfig,
    tensors: list[CheckpointTensor],
    values: Mapping[str, np.ndarray],
    shards: list[ShardLayout],
    stage: Stage,
) -> None:
    """Writes the shards. Raises FormatError for numbers of the checkpoint that the GGUF does not have."""
    places: dict[str, tuple[ShardTensor, np.ndarray]] = {}
    for shard in shards:
        path = folder / shard.name
        prefix = f"{path.parent.name}." if "/" in shard.name else ""
        path.parent.mkdir(exist_ok=True)
        with path.open("wb") as file:
            reserve_space(file.fileno(), shard.size)
            file.write(shard.header)
        mapped = np.memmap(path, np.uint8, "r+")
        for entry, offset in zip(shard.tensors, shard.offsets, strict=True):
            words = mapped[offset : offset + entry.nbytes].view(entry.words)
            columns = entry.shape[-1] if entry.shape else 1
            places[prefix + entry.name] = entry, words.reshape(prod(entry.shape[:-1]), columns)
    for name, numbers in values.items():
        entry, words = places[name]
        words[:] = narrowed(numbers, entry.dtype).reshape(words.shape)
    got: dict[str, int] = {}
    done = 0
    for spec in found.model.tensors:
        if spec.name not in source.tensors or not spec.sources:
            continue
        outputs = {number: places[name] for number, name in enumerate(spec.sources)}
        counts = fill(source.tensors[spec.name], spec, outputs, lambda n, item=spec.name: stage.advance(n, item))
        for number, count in counts.items():
            got[spec.sources[number]] = got.get(spec.sources[number], 0) + count
        done += 1
    short = [t.name for t in tensors if got.get(t.name, 0) < prod(t.shape)]
    if short:
        names = ", ".join(short[:3])
        raise FormatError(f"{source.path}: {len(short)} tensors of the checkpoint would be filled in part only: {names}")
    for mapped in {id(words.base): words for _, words in places.values()}.values():
        base = mapped
        while base is not None and not isinstance(base, np.memmap):
            base = base.base
        if base is not None:
            base.flush()


def _not_given_back(source: TensorSource, folder: Path, found: FoundConfig) -> list[str]:
    """Metadata that reading the checkpoint does not give again, without its name and what the types of tensors decide."""
    has_drafts = bool(source.metadata.get(f"{source.architecture}.nextn_predict_layers"))
    layout = found.layout if found.layout != "ik" else None
    again = open_source(folder, mla_layout=layout, mtp=has_drafts or None, allow_lossy_config=True)
    keys = [key for key in source.metadata if key not in _OWN and not key.startswith(_OTHERS)]
    lost = [key for key in keys if plain(again.metadata.get(key)) != plain(source.metadata[key])]
    known = {line.partition(",")[0] for line in _lost(found)}
    return [f"{key}, which no file of the checkpoint gives again" for key in lost if key not in known and key != "general.name"]
