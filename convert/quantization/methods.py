"""The quantisation methods of checkpoints: their names in config.json, and the functions that find the weights they store.

quantization_config names a method and its settings; which weights are quantised, and how each is, the tensors themselves show.
So a finder looks at the tensors under a weight's name, and returns None if they are not of its method.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from ...data_classes import dataclass
from ...formats.safetensors import StoredTensor
from ..config import Config, read_json
from . import awq, bitsandbytes, fp4, gptq
from . import compressed_tensors as compressed
from .ggml_blocks import find_blocks_weight
from .mxfp4 import Mxfp4Weight
from .stored_weights import BLOCKS_SUFFIX, SCALES_SUFFIX, StoredWeight, WeightTensors, find_scale

# (name of a weight, stored tensors, shape that the weight must have) -> the weight and its tensors
FindWeight = Callable[[str, Mapping[str, StoredTensor], tuple[int, ...]], WeightTensors | None]

DENSE = ("dense", None)
COMPRESSED = ("float-quantized", "naive-quantized", "int-quantized", "pack-quantized", "nvfp4-pack-quantized")
COMPRESSED += ("mxfp4-pack-quantized", "mxfp8-quantized", "mixed-precision", "dense")
MODELOPT = ("FP8", "FP8_PB_WO", "FP8_PB_REAL", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "W4A8_NVFP4_FP8", "W4A16_NVFP4")
MODELOPT += ("MIXED_PRECISION", "IQ1_S", "IQ2_XS")


@dataclass(frozen=True)
class Method:
    """A value of quant_method.

    key     of quantization_config that distinguishes variants; known: its supported values
    finder  (config, quantization_config) -> the method's finder; None if weights are floats or fp8 with scales
    """

    key: str
    known: tuple[object, ...]
    finder: Callable[[Config, dict], FindWeight] | None = None


def _mxfp4_finder(config: Config, settings: dict) -> FindWeight:
    return fp4.find_mxfp4_weight


def _find_modelopt_weight(name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
    return find_blocks_weight(name, stored) or fp4.find_modelopt_weight(name, stored, shape)


METHODS = {
    "fp8": Method("fmt", (None, "e4m3", "e5m2", "float8_e4m3fn", "float8_e5m2"), _mxfp4_finder),
    "fbgemm_fp8": Method("quant_method", ("fbgemm_fp8",)),
    "compressed-tensors": Method("format", (*COMPRESSED, None), lambda config, settings: compressed.find_weight),
    "modelopt": Method("quant_algo", MODELOPT, lambda config, settings: _find_modelopt_weight),
    "modelopt_fp4": Method("quant_algo", (*MODELOPT, None), lambda config, settings: _find_modelopt_weight),
    "mxfp4": Method("quant_method", ("mxfp4",)),  # stacks of experts with _blocks in their names: see mxfp4.py
    "gptq": Method("quant_method", ("gptq",), gptq.weight_finder),
    "bitsandbytes": Method("quant_method", ("bitsandbytes",), lambda config, settings: bitsandbytes.find_weight),
    "awq": Method("quant_method", ("awq",), awq.weight_finder),
}


class WeightFinder:
    """Finds the weights of a checkpoint that is quantised as its config.json says, or not at all."""

    def __init__(self, config: Config):
        """Raises FormatError for a quantisation that cannot be decoded, with the ones that are supported."""
        self.block: tuple[int, int] | None = None
        self._find_quantised: FindWeight | None = None
        settings = _quantization_config(config)
        if settings is None:
            return
        name = settings.get("quant_method") or _implied_method(settings)
        if not isinstance(name, str) or name not in METHODS:
            raise config.error(f"quantization_config has quant_method {name!r}; known are {', '.join(METHODS)}")
        method = METHODS[name]
        _check_variant(config, name, method, settings.get(method.key))
        block = settings.get("weight_block_size")
        if name == "compressed-tensors":
            block = _block_structure(config, method, settings)
        self.block = _check_block(config, block)
        if method.finder is not None:
            self._find_quantised = method.finder(config, settings)

    def __call__(self, name: str, stored: Mapping[str, StoredTensor], shape: tuple[int, ...]) -> WeightTensors | None:
        """The weight of this name and shape, and the tensors that it is decoded from; None if it does not exist.

        Raises FormatError for tensors that do not fit together.
        """
        if self._find_quantised is not None:
            weight = self._find_quantised(name, stored, shape)
            if weight is not None:
                return weight
        tensor = stored.get(name)
        if tensor is None:
            return None
        is_mxfp4 = name.endswith(BLOCKS_SUFFIX)
        scale = find_scale(name, stored) if is_mxfp4 or tensor.dtype.startswith("F8_") else None
        if is_mxfp4:
            return (Mxfp4Weight(tensor, scale), [tensor, scale]) if scale is not None else None
        return StoredWeight(tensor, scale, self.block), [tensor] if scale is None else [tensor, scale]


def missing_name(name: str, stored: Mapping[str, StoredTensor]) -> str:
    """The name of the tensor to report as missing for a weight that was not found: its own, or that of its mxfp4 scales."""
    has_blocks = name in stored and name.endswith(BLOCKS_SUFFIX)
    return name.removesuffix(BLOCKS_SUFFIX) + SCALES_SUFFIX if has_blocks else name


def _quantization_config(config: Config) -> dict[str, Any] | None:
    settings = config.get("quantization_config") or config.get("compression_config")
    if settings is None:
        text = config.get("text_config")
        settings = text.get("quantization_config") if isinstance(text, dict) else None
    if settings is None:
        path = config.path.with_name("hf_quant_config.json")  # where older modelopt checkpoints have it
        quantization = read_json(path).get("quantization") if path.is_file() else None
        if isinstance(quantization, dict) and quantization.get("quant_algo") is not None:
            settings = quantization | {"quant_method": "modelopt"}
    if settings is None:
        return None
    if not isinstance(settings, dict):
        raise config.error("quantization_config is not an object")
    return settings


def _implied_method(settings: dict) -> str | None:
    """The method of a quantization_config without quant_method: modelopt's early exporters name themselves as the producer."""
    producer = settings.get("producer")
    name = producer.get("name") if isinstance(producer, dict) else producer
    return "modelopt" if name == "modelopt" and settings.get("quant_algo") is not None else None


def _check_variant(config: Config, name: str, method: Method, value: object) -> None:
    if isinstance(value, (list, dict)) or value not in method.known:
        known = ", ".join(str(k) for k in method.known if k is not None)
        raise config.error(f"quantization_config of quant_method {name} has {method.key} {value!r:.60}; known are {known}")


def _block_structure(config: Config, method: Method, settings: dict) -> object:
    """The block_structure of compressed-tensors' config_groups, the same for all of them, or None; checks their formats."""
    sparsity = settings.get("sparsity_config")
    if isinstance(sparsity, dict) and sparsity.get("format") not in DENSE:
        raise config.error(f"quantization_config has sparsity_config of format {sparsity.get('format')!r}; only dense is known")
    structures = set()
    try:
        for group in settings["config_groups"].values():
            _check_variant(config, "compressed-tensors", method, group.get("format"))
            structure = (group.get("weights") or {}).get("block_structure")
            if structure:
                structures.add(json.dumps(structure))
    except (KeyError, TypeError, AttributeError):
        raise config.error("quantization_config of quant_method compressed-tensors lacks config_groups with weights") from None
    if len(structures) > 1:
        raise config.error(f"quantization_config has several block structures: {', '.join(sorted(structures))}")
    return json.loads(next(iter(structures), "null"))


def _check_block(config: Config, block: object) -> tuple[int, int] | None:
    if block is None:
        return None
    if not isinstance(block, (list, tuple)) or len(block) != 2 or not all(type(b) is int and b > 0 for b in block):
        raise config.error(f"weight_block_size is {block!r}; two whole numbers are needed")
    return block[0], block[1]
