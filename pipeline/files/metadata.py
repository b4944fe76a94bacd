"""`ggufmill metadata`: keys of a GGUF set, removed and renamed, in place where the header's size allows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...errors import PlanError, UsageError
from ...formats import open_gguf
from ...formats.file_range import read_range, read_text
from ...formats.gguf import SPLIT_NAME, header_record
from ...formats.header_edit import TYPE_NAMES, metadata_value, read_header, type_name
from ...jobs.atomic_write import atomic_file
from ...jobs.header_update import finish_replacing, replace_header
from ...jobs.lock import output_lock, remove_abandoned_lock
from ..common.arguments import check_folder, check_new, check_output_space, refuse_inputs
from ..common.messages import note
from ..common.progress import Stage, reporting
from ..common.shown import shown
from ..requests.files import MetadataRequest
from ..requests.verb import verb
from .inspect import plain_metadata, plain_value

_BLOCK = 1 << 24  # bytes copied at a time
_LAYOUT_KEYS = ("general.alignment", "split.")  # what the file's own layout follows
_NEEDED = "general.architecture"


@dataclass(frozen=True)
class MetadataChange:
    """One key before and after; types as in 'uint32' or 'string[]', None where the key is not there."""

    key: str
    type_before: str | None
    before: Any
    type_after: str | None
    after: Any


@shown
@dataclass
class MetadataResult:
    """What became of the metadata.

    status    'unchanged', 'planned' (dry_run), 'in place' (only the header was written) or 'rewritten' (the whole file was)
    file      the file that has, or would have, the new metadata
    changes   one for each key that differs
    metadata  all keys of the file afterwards; long arrays as their length and first values
    nbytes    bytes that were, or would be, written
    """

    status: str
    file: Path
    changes: list[MetadataChange] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    nbytes: int = 0

    def as_json(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {**vars(self), "file": str(self.file), "changes": [vars(change) for change in self.changes]}


@verb(MetadataRequest)
def edit_metadata(request: MetadataRequest) -> MetadataResult:
    """Sets, removes and renames metadata of a GGUF; without any of them they are only read. The tensors stay as they are.

    A header that keeps its size (rounded up to the alignment) is written in place; else a new file is written next to it
    and takes its name, which needs its size in free disk space. Either way a kill or a power cut loses nothing: an interrupted
    change in place is completed by the next call.

    Returns a `MetadataResult`. Raises PlanError for a key that is not there, for one that the file's layout follows (alignment,
    split) and for a value that does not fit the type; FormatError for a damaged file; MillError if it cannot be written.

    Example:
        >>> from ggufmill import convert_model, edit_metadata
        >>> from ggufmill.recipes import FOLDER
        >>> _ = convert_model(FOLDER / "demo", "demo.gguf", outtype="q8_0", force=True)
        >>> result = edit_metadata("demo.gguf", set={"general.name": "Demo"}, remove=["general.type"])
        >>> result.metadata["general.name"]
        'Demo'
    """
    path, target = Path(request.file), Path(request.out) if request.out is not None else None
    _complete_interrupted(path)
    path = open_gguf(path).paths[0]
    header = read_header(path)
    values = {**(request.set or {}), **{key: _read_text(Path(name)) for key, name in (request.set_file or {}).items()}}
    metadata = _changed(header.metadata, values, request.remove, request.rename or {})
    new = header.with_metadata(metadata)
    result = MetadataResult("unchanged", target or path, _changes(header.metadata, metadata), plain_metadata(metadata))
    if not result.changes and target is None:
        remove_abandoned_lock(path)
        return result
    in_place = target is None and len(new) == header.nbytes
    result.nbytes = len(new) if in_place else path.stat().st_size + len(new) - header.nbytes
    _check(path, target, result.nbytes, request.force)
    if request.dry_run:
        result.status = "planned"
        return result
    with output_lock(target or path), reporting(request.progress) as report:
        if in_place:
            replace_header(path, new)
        else:
            _rewrite(path, header.nbytes, new, target or path, Stage(report, "metadata", result.nbytes))
    result.status = "in place" if in_place else "rewritten"
    return result


def _complete_interrupted(path: Path) -> None:
    """Completes the change of a header, of any shard, that a kill interrupted. Raises PlanError, MillError."""
    match = SPLIT_NAME.match(path.name)
    first = path.with_name(f"{match['stem']}-00001-of-{match['count']}.gguf") if match is not None else path
    if header_record(first).exists():
        with output_lock(first):
            if finish_replacing(first):
                note(f"{first}: a change of its metadata that was interrupted is complete now")


def _check(path: Path, target: Path | None, nbytes: int, force: bool) -> None:
    """Raises PlanError for what stands in the way of writing."""
    if target is not None:
        if SPLIT_NAME.match(path.name):
            raise PlanError(f"{path} is a file of a split model; change it in place, or `ggufmill merge` it first")
        refuse_inputs([target], [path])
        check_new(target, force)
    elif path.is_symlink():
        raise PlanError(f"{path} is a link to {path.resolve()}, which others may use; give -o OUT, or change that file")
    elif path.stat().st_nlink > 1:
        raise PlanError(f"{path} has another name too (a hard link), whose metadata would change with it; give -o OUT")
    busy = next((p for p in (path.with_name(path.name + end) for end in (".journal", ".part")) if p.exists()), None)
    if busy is not None:
        raise PlanError(f"{busy} exists: a job for {path} is not finished")
    check_folder(target or path)
    check_output_space(target or path, nbytes)


def _rewrite(path: Path, data_start: int, header: bytes, target: Path, stage: Stage) -> None:
    """Writes the new header and the data of a file under the name `target`. Raises MillError."""
    size = path.stat().st_size
    with atomic_file(target) as out:
        out.write(header)
        stage.advance(len(header), "header")
        for offset in range(data_start, size, _BLOCK):
            count = min(_BLOCK, size - offset)
            out.write(read_range(path, offset, count).data)
            stage.advance(count)


def _read_text(path: Path) -> str:
    """Raises UsageError for a file that is not a text."""
    try:
        return read_text(path)
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read as a text: {error}") from None


def _changed(
    before: Mapping[str, Any], set: Mapping[str, Any], remove: Sequence[str], rename: Mapping[str, str]
) -> dict[str, Any]:
    """The metadata afterwards, keys in their order, new ones last. Raises PlanError."""
    for key in (*set, *remove, *rename, *rename.values()):
        if key.startswith(_LAYOUT_KEYS):
            raise PlanError(f"{key} follows from how the file is laid out (`split` and `merge` write other layouts)")
    missing = next((key for key in (*remove, *rename) if key not in before), None)
    if missing is not None:
        near = get_close_matches(missing, before, 1)
        raise PlanError(f"there is no key {missing}" + (f"; did you mean {near[0]}?" if near else ""))
    kept = {key: value for key, value in before.items() if key not in remove}
    names = [rename.get(key, key) for key in kept]
    taken = next((name for name in rename.values() if names.count(name) > 1), None)
    if taken is not None:
        raise PlanError(f"two keys would be named {taken}; remove one of them (--remove KEY)")
    metadata = {rename.get(key, key): value for key, value in kept.items()}
    for key, value in set.items():
        name, type = _name_and_type(key, metadata)
        metadata[name] = metadata_value(value, type, name)
    if not metadata.get(_NEEDED) and before.get(_NEEDED):
        raise PlanError(f"without {_NEEDED} nothing loads the file")
    return metadata


def _name_and_type(key: str, metadata: Mapping[str, Any]) -> tuple[str, str | None]:
    """KEY:TYPE or KEY -> (key, type). The type of a key that is there is the default; None for a new one."""
    name, _, type = key.rpartition(":")
    if name and key not in metadata and type.removesuffix("[]") in TYPE_NAMES:
        return name, type
    return key, type_name(key, metadata[key]) if key in metadata else None


def _changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[MetadataChange]:
    changes = []
    for key in dict.fromkeys((*before, *after)):
        old, new = ((type_name(key, m[key]), m[key]) if key in m else (None, None) for m in (before, after))
        change = MetadataChange(key, old[0], plain_value(old[1]), new[0], plain_value(new[1]))
        if old[0] != new[0] or plain_value(old[1], True) != plain_value(new[1], True):
            changes.append(change)
    return changes
