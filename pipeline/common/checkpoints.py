"""What a checkpoint stores: config.json and the tensors of its safetensors files, before anything is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...convert.hub.fetch import FetchedRepository, fetch_repository, is_repository
from ...data_classes import dataclass
from ...errors import FormatError
from ...formats.loaders import MLA_LAYOUTS
from ...formats.safetensors import StoredTensor
from ...jobs.streamed_json import StreamedJson
from .rows import Rows, type_histogram
from .shown import shown

if TYPE_CHECKING:
    from ...convert.checkpoint import Checkpoint


@shown
@dataclass
class CheckpointSummary(StreamedJson):
    """What a checkpoint folder, or a repository on the hub, holds.

    source        as it was given
    architecture  as config.json names it; gguf_architecture: that of the GGUF that `convert` makes, None if it does not
    problem       why `convert` does not take it; '' if it does
    config        the keys of config.json, those of nested objects as 'outer.inner'
    tensors       name, shape (outermost dimension first), type, file, offset (from the file's start), nbytes and n_elements
    types         type -> tensors and nbytes, most bytes first
    parameters    elements of all stored tensors, scales included; total_bytes: their bytes
    notes         what conversion leaves out or assumes, one line each
    """

    source: str
    architecture: str
    gguf_architecture: str | None
    problem: str
    config: dict[str, Any]
    tensors: Sequence[dict[str, Any]]
    types: dict[str, dict[str, int]]
    parameters: int
    total_bytes: int
    notes: list[str] = field(default_factory=list)

    def json_fields(self) -> dict[str, Any]:
        """What --json prints: the fields."""
        return {**{f.name: getattr(self, f.name) for f in fields(self)}, "tensors": iter(self.tensors)}


def summarize_checkpoint(source: str | Path) -> CheckpointSummary:
    """Reads config.json and the headers of the weights; of hf:OWNER/NAME they are all that is downloaded, with the small files.

    Raises FormatError for a folder without config.json and for damaged files.
    """
    from ...convert.checkpoint import open_checkpoint

    at_hub = is_repository(source)
    fetched = fetch_repository(str(source), remote=True) if at_hub else FetchedRepository(str(source), Path(source))
    if not (fetched.folder / "config.json").is_file():
        raise FormatError(f"{source} is no checkpoint: it has no config.json")
    checkpoint = open_checkpoint(fetched)
    tensors = Rows(checkpoint.stored, _describe)
    types = type_histogram(tensors)
    architecture, notes, problem = _convertible(checkpoint)
    return CheckpointSummary(
        source=str(source),
        architecture=", ".join(map(str, checkpoint.config.values.get("architectures") or ())),
        gguf_architecture=architecture,
        problem=problem,
        config=_flat(checkpoint.config.values),
        tensors=tensors,
        types=types,
        parameters=sum(prod(t.shape) for t in checkpoint.stored.values()),
        total_bytes=sum(entry["nbytes"] for entry in types.values()),
        notes=notes,
    )


def _describe(tensor: StoredTensor) -> dict[str, Any]:
    return {
        "name": tensor.name,
        "shape": list(tensor.shape),
        "type": tensor.dtype.lower(),
        "file": tensor.path.name,
        "offset": tensor.offset,
        "nbytes": tensor.nbytes,
        "n_elements": prod(tensor.shape),
    }


def _convertible(checkpoint: Checkpoint) -> tuple[str | None, list[str], str]:
    """(architecture of the GGUF or None, notes, why it cannot be converted or '')."""
    from ...convert.architectures.registry import model_spec
    from ...convert.checkpoint import assemble
    from ...convert.tokenizers.vocabulary import read_vocabulary

    try:
        model = model_spec(checkpoint.config, MLA_LAYOUTS[0], None, checkpoint.stored)
        model, _, notes = assemble(checkpoint, model, None)
        _, vocabulary_notes = read_vocabulary(checkpoint.folder, checkpoint.config, model.vocab_size, is_needed=True)
    except FormatError as error:
        return None, [], str(error)
    return model.architecture, [*notes, *model.notes, *vocabulary_notes], ""


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
