"""Ways in which checkpoints are quantised: what config.json calls them, and who finds the weights that each stores.

quantization_config names a method and its settings; which weights are quantised, and how each, their tensors say. So a finder
looks at what lies under a weight's name: None means that it is no business of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ...formats.safetensors import StoredTensor
from ..config import Config, read_json
from . import awq, fp4, gptq
from . import compressed_tensors as compressed
from .mxfp4 import Mxfp4Weight
from .stored_weights import BLOCKS, SCALES, Found, Weight, find_scale

Finder = Callable[[str, Mapping[str, StoredTensor], tuple[int, ...]], Found | None]

DENSE = ("dense", None)
COMPRESSED = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized")
COMPRESSED += ("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense")
MODELOPT = ("FP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A8_NVFP4_FP8", "W4A16_NVFP4")
MODELOPT += ("MIXED_PRECISION",)


@dataclass(frozen=True)
class Method:
    """key: of quantization_config, and the values of it that are known; finders: beside the one for floats and fp8."""

    key: str
    known: tuple[object, ...]
    finders: Callable[[Config, dict], list[Finder]] = lambda config, settings: []


METHODS = {
    "fp8": Method("fmt", (None, "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2")),
    "fbgemm_fp8": Method("quant_method", ("fbgemm_fp8",)),
    "compressed-tensors": Method("format", (*COMPRESSED, None), lambda config, settings: [compressed.find]),
    "modelopt": Method("quant_algo", MODELOPT, lambda config, settings: [fp4.modelopt]),
    "modelopt_fp4": Method("quant_algo", (*MODELOPT, None), lambda config, settings: [fp4.modelopt]),
    "mxfp4": Method("quant_method", ("mxfp4",)),  # of experts' stacks, whose names say so: see mxfp4.py
    "gptq": Method("quant_method", ("gptq",), lambda config, settings: [gptq.finder(config, settings)]),
    "awq": Method("quant_method", ("awq",), lambda config, settings: [awq.finder(config, settings)]),
}


class Finders:
    """Finds the weights of a checkpoint that is quantised as its config.json says, or not at all."""

    def __init__(self, config: Config):
        """Raises FormatError for a quantization that cannot be decoded, naming it and what is known."""
        self.block: tuple[int, int] | None = None
        self._own: list[Finder] = []
        settings = _settings(config)
        if settings is None:
            return
        name = settings.get("quant_method")
        if not isinstance(name, str) or name not in METHODS:
            raise config.fail(f"quantization_config has quant_method {name!r}; known are {', '.join(METHODS)}")
        method = METHODS[name]
        _expect(config, name, method, settings.get(method.key))
        block = settings.get("weight_block_size")
        if name == "compressed-tensors":
            block = _groups(config, method, settings)
        self.block = _block(config, block)
        self._own = method.finders(config, settings)

    def __call__(self, name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> Found | None:
        """The weight of this name and shape, and the tensors that it is made of; None if it is not there.

        Raises FormatError for tensors that do not fit together.
        """
        for find in self._own:
            found = find(name, stored, shape)
            if found is not None:
                return found
        tensor = stored.get(name)
        if tensor is None:
            return None
        is_packed = name.endswith(BLOCKS)
        scale = find_scale(name, stored) if is_packed or tensor.dtype.startswith("F8_") else None
        if is_packed:
            return (Mxfp4Weight(tensor, scale), [tensor, scale]) if scale is not None else None
        return Weight(tensor, scale, self.block), [tensor] if scale is None else [tensor, scale]


def missing(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """What is to be called missing where a weight was not found: itself, or the scales without which it is nothing."""
    return name.removesuffix(BLOCKS) + SCALES if name in stored and name.endswith(BLOCKS) else name


def _settings(config: Config) -> dict[str, Any] | None:
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None:
        text = config.get("text_config")
        settings = text.get("quantization_config") if isinstance(text, dict) else None
    if settings is None:
        path = config.path.with_name("hf_quant_config.json")  # where modelopt says it in its older checkpoints
        told = read_json(path).get("quantization") if path.is_file() else None
        if isinstance(told, dict) and told.get("quant_algo") is not None:
            settings = told | {"quant_method": "modelopt"}
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise config.fail("quantization_config is not an object")
    return settings


def _expect(config: Config, name: str, method: Method, value: object) -> None:
    if isinstance(value, (list, dict)) or value not in method.known:
        known = ", ".join(str(k) for k in method.known if k is not None)
        raise config.fail(f"quantization_config of quant_method {name} has {method.key} {value!r:.60}; known are {known}")


def _groups(config: Config, method: Method, settings: dict) -> object:
    """The block_structure of compressed-tensors' config_groups: one for all groups, or None. Their formats are checked."""
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in DENSE:
        raise config.fail(f"quantization_config has sparsity_config of format {sparsity.get('format')!r}; only dense is known")
    structures = set()
    try:
        for group in settings["config_groups"].values():
            _expect(config, "compressed-tensors", method, group.get("format"))
            structure = (group.get("weights") or {}).get("block_structure")
            if structure:
                structures.add(json.dumps(structure))
    except (KeyError, TypeError, AttributeError):
        raise config.fail("quantization_config of quant_method compressed-tensors lacks config_groups with weights") from None
    if len(structures) > 1:
        raise config.fail(f"quantization_config has several block structures: {', '.join(sorted(structures))}")
    return json.loads(next(iter(structures), "null"))


def _block(config: Config, block: object) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise config.fail(f"weight_block_size is {block!r}; two whole numbers are needed")
    return block[0], block[1]
