"""The models of a folder: its GGUF files and those of the folders in it, under the names by which requests choose them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from ...data_classes import dataclass
from ...formats import FormatError, MillError
from ...formats.gguf import SPLIT_NAME, open_gguf
from ...formats.metadata_values import text_of, whole_number

_OTHER_ARCHITECTURES = ("clip", "controlvector", "imatrix")  # of GGUF files that are no models

Stamp = tuple[tuple[str, int, int], ...]  # name, size and time of change of each file


@dataclass(frozen=True)
class ModelFile:
    """A model in a folder.

    name     what requests call it; aliases: what they may call it too
    path     the file, or the first shard
    stamp    of its files, as they were when it was found
    problem  why it cannot be read; '': its header can
    n_ctx    the context that it was trained for; 0 if it does not say
    """

    name: str
    aliases: tuple[str, ...]
    path: Path
    stamp: Stamp
    problem: str = ""
    architecture: str = ""
    n_ctx: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of its files."""
        return sum(size for _, size, _ in self.stamp)

    @property
    def changed(self) -> int:
        """Seconds since 1970 of the latest change of a file."""
        return max(time for _, _, time in self.stamp) // 10**9


class ModelFolder:
    """A folder of models. What has not changed is not read again."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._known: dict[Path, tuple[Stamp, ModelFile | None]] = {}

    def models(self) -> dict[str, ModelFile]:
        """The models that are there now, by name: that of the file without .gguf, and without what numbers the shards of a
        split model; before it the name of the folder in the folder, or only this where it has one model.

        Projectors, adapters, importance matrices and vocabularies are no models. A file that cannot be read is listed with
        its problem. Raises MillError if the folder cannot be listed.
        """
        try:
            listed = sorted(self.path.iterdir())
        except OSError as error:
            raise MillError(f"{self.path}: the folder of models cannot be listed: {error.strerror}") from None
        found = {model.name: model for model in self._of_folder(listed, "")}
        for folder in listed:
            if folder.is_dir():
                try:
                    inside = sorted(folder.iterdir())
                except OSError:
                    continue
                models = list(self._of_folder(inside, folder.name))
                for model in models:
                    short = folder.name if len(models) == 1 and folder.name not in found else ""
                    aliases = (*model.aliases, model.name)
                    found[short or model.name] = replace(model, name=short, aliases=aliases) if short else model
        self._known = {path: known for path, known in self._known.items() if path.exists()}
        return found

    def is_current(self, model: ModelFile) -> bool:
        """Whether a model's files are as they were when it was found."""
        return _stamp([model.path.with_name(name) for name, _, _ in model.stamp]) == model.stamp

    def _of_folder(self, paths: list[Path], folder: str) -> Iterator[ModelFile]:
        groups: dict[str, list[Path]] = {}
        whole = {path.stem for path in paths if path.suffix == ".gguf"}
        for path in paths:
            if path.suffix == ".gguf" and not path.name.startswith((".", "mmproj")) and path.is_file():
                match = SPLIT_NAME.match(path.name)
                stem = match["stem"] if match else path.stem
                name = f"{stem}-of-{match['count']}" if match and stem in whole else stem  # beside the same in one file
                groups.setdefault(f"{folder}/{name}" if folder else name, []).append(path)
        for name, files in groups.items():
            stamp = _stamp(files)
            known = self._known.get(files[0])
            if known is None or known[0] != stamp:
                known = self._known[files[0]] = stamp, _read(name, files[0], stamp)
            if known[1] is not None:
                yield known[1]


def _stamp(files: list[Path]) -> Stamp:
    found = []
    for path in files:
        try:
            status = os.stat(path)
        except OSError:
            continue
        found.append((path.name, status.st_size, status.st_mtime_ns))
    return tuple(found)


def _read(name: str, path: Path, stamp: Stamp) -> ModelFile | None:
    """The model whose first file this is; None if it is a file of another kind."""
    aliases = (f"{name.rpartition('/')[0]}/{path.name}".lstrip("/"),)
    try:
        file = open_gguf(path)
    except (FormatError, OSError) as error:
        return ModelFile(name, aliases, path, stamp, str(error))
    if (text_of(file.metadata, "general.type") or "model") != "model":
        return None
    if file.architecture in _OTHER_ARCHITECTURES or not file.tensors:
        return None
    try:
        n_ctx = whole_number(file.metadata, f"{file.architecture}.context_length", path=path)
    except FormatError as error:
        return ModelFile(name, aliases, path, stamp, str(error))
    return ModelFile(name, aliases, path, stamp, "", file.architecture, n_ctx)
