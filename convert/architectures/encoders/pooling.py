"""What sentence-transformers keeps next to a checkpoint: modules.json, and in a folder each the pooling and the dense layers
after it."""

from __future__ import annotations

from dataclasses import field
from pathlib import Path

import numpy as np

from ....data_classes import dataclass
from ....formats import FormatError
from ....formats.file_range import read_text
from ...config import Config, read_json
from ...model_spec import TensorSpec

POOLINGS = {"none": 0, "mean": 1, "cls": 2, "last": 3, "rank": 4}  # values of ARCHITECTURE.pooling_type
# key of the pooling's config.json -> pooling
_MODES = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls", "pooling_mode_lasttoken": "last"}
FILE = "modules.json"


@dataclass(frozen=True)
class SentenceModules:
    """The modules after the transformer.

    pooling  a key of POOLINGS, or None: no file says
    dense    (folder, inputs, outputs, whether it has a bias) of each dense layer, in order
    notes    what a GGUF cannot express
    """

    pooling: str | None = None
    dense: list[tuple[str, int, int, bool]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_modules(folder: Path) -> SentenceModules:
    """Raises FormatError for a malformed file, and for a pooling that cannot be converted."""
    path = folder / FILE
    if not path.is_file():
        return SentenceModules()
    pooling, dense, notes = None, [], []
    for module in _list_of_objects(path):
        kind, place = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        settings = folder / place / "config.json"
        if kind == "Pooling":
            pooling = _pooling(Config(settings, read_json(settings)))
        elif kind == "Dense":
            config = Config(settings, read_json(settings))
            activation = str(config.get("activation_function", "Identity")).rpartition(".")[2]
            if activation != "Identity":
                notes.append(f"the activation {activation} of {place} has no counterpart in GGUF: the layer is left out")
            else:
                sizes = config.integer("in_features"), config.integer("out_features")
                dense.append((place, *sizes, config.flag("bias", True)))
    return SentenceModules(pooling, dense, notes)


def pooling_keys(architecture: str, config: Config, default: str, notes: list[str]) -> dict[str, np.uint32]:
    """ARCHITECTURE.pooling_type, from the modules or else the default, which a note then names; of a model that ranks the
    architecture sets it."""
    modules = read_modules(config.path.parent)
    ranks = str((config.get("architectures") or [""])[0]).endswith("ForSequenceClassification")
    if modules.pooling is None and not ranks:
        notes.append(f"there is no {FILE} that says how outputs are pooled; taken as {default}")
    notes += modules.notes
    return {f"{architecture}.pooling_type": np.uint32(POOLINGS[modules.pooling or default])}


def dense_tensors(architecture: str, config: Config) -> tuple[list[TensorSpec], dict[str, np.uint32]]:
    """The tensors dense_2, dense_3 of the layers after the pooling (embeddinggemma's two), and their metadata.

    Raises FormatError for more layers, or ones with a bias.
    """
    tensors, keys = [], {}
    layers = read_modules(config.path.parent).dense
    if len(layers) > 2 or any(bias for *_, bias in layers):
        raise config.error(f"{FILE} names {len(layers)} dense layers; at most two without bias can be converted")
    for number, (place, inputs, outputs, _) in enumerate(layers, 2):
        tensors.append(TensorSpec(f"dense_{number}.weight", (f"{place}.linear.weight",), (outputs, inputs)))
        keys |= {f"{architecture}.dense_{number}_feat_in": np.uint32(inputs)}
        keys |= {f"{architecture}.dense_{number}_feat_out": np.uint32(outputs)}
    return tensors, keys


def _pooling(config: Config) -> str:
    mode = config.get("pooling_mode")
    names = [mode] if isinstance(mode, str) else [name for key, name in _MODES.items() if config.get(key) is True]
    names = ["last" if name == "lasttoken" else name for name in names]
    if len(names) != 1 or names[0] not in POOLINGS:
        raise config.error(f"the pooling is {mode or names or 'none of those known'}; one of mean, cls and lasttoken is needed")
    return names[0]


def _list_of_objects(path: Path) -> list[dict]:
    import json

    try:
        values = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: not JSON ({error})") from None
    if not isinstance(values, list) or not all(isinstance(value, dict) for value in values):
        raise FormatError(f"{path}: not a list of modules")
    return values
