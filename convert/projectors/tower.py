"""What a tower is: a vision or audio encoder with its projector, as tables of names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ..config import Config
from .rows import Row, one_number

Keys = dict[str, Any]  # metadata
ATTENTION = tuple((f"self_attn.{p}_proj", f"attn_{p}") for p in "qkv")
LIMITS = ("input_min", "input_max", "output_min", "output_max")  # of the clipped linear layers of Gemma 4
SIZES: dict[str, tuple[str, ...]] = {
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
}
IMAGE_SIZES = {"image_size": ("image_size",), "patch_size": ("patch_size",)}


def no_values(config: Config) -> dict[str, int]:
    """For a tower whose section says everything, and one that has no tensors of that kind."""
    return {}


@dataclass(frozen=True)
class Tower:
    """A tower and its projector.

    projector   clip.projector_type; by_modality: it is written as clip.vision.projector_type or clip.audio.projector_type
    prefixes    beginnings of the tensors' names in checkpoints -> what the rows' sources begin with
    rows        its tensors
    keys        (config.json, the tower's section, what the processor says) -> metadata beyond the sizes
    section     where config.json describes it, a path of keys
    sizes       metadata key without clip.vision. -> keys of the section, the first one that is there counts
    defaults    sizes that the section may lack, from the section
    computed    tensors that checkpoints do not have: name in the file -> (section) -> float32 values
    ignored     beginnings of names, after `prefixes`, of tensors that no program uses
    float32     patterns of names in the file of matrices that stay f32; float16: that are f16 whatever is asked for
    audio       audio, not vision
    """

    projector: str
    prefixes: Mapping[str, str]
    rows: tuple[Row, ...]
    keys: Callable[[Config, Config, Config], Keys]
    section: tuple[str, ...] = ("vision_config",)
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    defaults: Callable[[Config], Mapping[str, int]] = no_values
    computed: Mapping[str, Callable[[Config], np.ndarray]] = field(default_factory=dict)
    ignored: tuple[str, ...] = ()
    float32: tuple[str, ...] = ()
    float16: tuple[str, ...] = ()
    by_modality: bool = False
    audio: bool = False

    @property
    def modality(self) -> str:
        """As in metadata keys."""
        return "audio" if self.audio else "vision"

    @property
    def size_keys(self) -> Mapping[str, tuple[str, ...]]:
        """Metadata keys without clip.vision. or clip.audio. -> keys of the section."""
        return SIZES | ({} if self.audio else IMAGE_SIZES) | dict(self.sizes)


def block(layer: str, name: str, names: Mapping[str, str]) -> tuple[Row, ...]:
    """Rows of each layer, from the part of the name after the layer's."""
    return tuple(Row(f"{layer}.{source}", f"{name}.{target}") for source, target in names.items())


def clipped(layer: str, name: str, names: Mapping[str, str]) -> tuple[Row, ...]:
    """Rows of linear layers that clip what goes in and comes out, where the checkpoint has the limits."""
    limits = {f"{source}.{limit}": f"{target}.{limit}" for source, target in names.items() for limit in LIMITS}
    return (
        *block(layer, name, {f"{source}.linear": target for source, target in names.items()}),
        *(Row(f"{layer}.{s}", f"{name}.{t}", one_number, optional=True, bare=True) for s, t in limits.items()),
    )


def llava_prefixes(tower: str) -> dict[str, str]:
    """The beginnings of names in checkpoints of the Llava family, old and new, in which the tower has this name."""
    names = {tower: "", "multi_modal_projector.": "projector."}
    return {f"{model}{name}": ours for model in ("", "model.") for name, ours in names.items()}
