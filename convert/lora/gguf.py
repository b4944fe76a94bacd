"""An adapter as the source of a GGUF, with the names and metadata that llama.cpp's convert_lora_to_gguf.py gives it."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...errors import FormatError
from ...formats import SourceTensor, TensorSource
from ...formats.source import LORA_A, LORA_B, files_stamp
from ..architectures.registry import model_spec
from ..config import read_config
from ..hub.fetch import fetch_repository, is_repository
from ..metadata import general_keys
from ..model_spec import ModelSpec
from .adapter import Adapter
from .naming import EMBEDDING, adapter_of_folder
from .peft_folder import peft_config, read_peft_folder


def open_adapter(
    folder: str | Path, base: str | Path | None = None, mla_layout: str | None = None, architecture: str | None = None
) -> TensorSource:
    """A folder of peft as the source of an adapter's GGUF.

    base                      the model that it changes (a folder or hf:OWNER/NAME), of which config.json is read; None: where
                              adapter_config.json says
    mla_layout, architecture  as for `open_source`

    Raises FormatError for adapters that cannot be converted, or without `base` if that is not known.
    """
    config = read_config(base_of_adapter(Path(folder), base))
    return adapter_source(Path(folder), model_spec(config, mla_layout or "ik", architecture))


def adapter_source(folder: Path, model: ModelSpec) -> TensorSource:
    """The GGUF of a folder of peft; model: what config.json of the model that it changes amounts to.

    Raises FormatError for what no GGUF can say.
    """
    adapter = adapter_of_folder(read_peft_folder(folder), model)
    metadata = general_keys(adapter.architecture, folder, peft_config(folder).with_values({"_name_or_path": None}))
    metadata |= {"general.type": "adapter", "adapter.type": "lora", "adapter.lora.alpha": np.float32(adapter.alpha)}
    tensors: dict[str, SourceTensor] = {}
    for name in adapter.changes:
        for part, values in zip((LORA_A, LORA_B), _stored(adapter, name), strict=True):
            tensors[name + part] = _tensor(name + part, values, adapter.source_type)
    identity = files_stamp(adapter.files).hex()
    return TensorSource(str(folder), metadata, tensors, identity, notes=list(adapter.notes), files=list(adapter.files))


def base_of_adapter(folder: Path, base: str | Path | None) -> Path:
    """The folder with config.json of the model that an adapter changes: `base` (a folder or hf:OWNER/NAME), or where
    adapter_config.json says. Raises FormatError if there is none."""
    named = peft_config(folder).get("base_model_name_or_path", "")
    if base is None and (Path(str(named)) / "config.json").is_file():
        return Path(str(named))
    if base is None:
        raise FormatError(
            f"{folder}: the model that it changes, {str(named) or 'which it does not name'!r:.80}, is no folder here; give its "
            "config.json with --base FOLDER or --base hf:OWNER/NAME"
        )
    return fetch_repository(str(base), remote=True).folder if is_repository(base) else Path(base)


def _stored(adapter: Adapter, name: str) -> tuple[np.ndarray, np.ndarray]:
    """lora_a and lora_b as they are in the file, where alpha / rank is the scale of all (the rank is that of each pair)."""
    change = adapter.changes[name]
    a, b = change.a, change.with_scale(adapter.alpha / change.rank if adapter.alpha else 1.0).b
    if name == EMBEDDING:  # llama.cpp looks up rows of lora_a, and multiplies them with lora_b
        return b, a.transpose(0, 2, 1)
    return a, b


def _tensor(name: str, values: np.ndarray, source_type: str) -> SourceTensor:
    """values: float32 [matrices, rows, columns]."""
    matrices, rows, columns = values.shape
    flat = np.ascontiguousarray(values, np.float32).reshape(-1, columns)
    shape = (columns, rows) if matrices == 1 else (columns, rows, matrices)
    return SourceTensor(name, shape, source_type, lambda start, stop: flat[start:stop])
