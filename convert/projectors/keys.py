"""Metadata of projector files beyond the sizes: one function per projector, from config.json and preprocessor_config.json."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ..config import Config
from .towers import ACTIVATIONS

Keys = dict[str, Any]
EPSILON = "clip.vision.attention.layer_norm_epsilon"


def _qwen2vl(config: Config, vision: Config, processor: Config) -> Keys:
    return {EPSILON: np.float32(config.number("rms_norm_eps", 1e-6))}


def _qwen25vl(config: Config, vision: Config, processor: Config) -> Keys:
    """Every n-th block attends to the whole image, the others to windows; another pattern is refused."""
    blocks = vision.get("fullatt_block_indexes")
    step = blocks[0] + 1 if isinstance(blocks, list) and blocks and isinstance(blocks[0], int) else 0
    if not step or blocks != list(range(step - 1, step * len(blocks), step)):
        raise vision.error(f"fullatt_block_indexes is {blocks!r:.60}; every n-th block is needed")
    keys = {"clip.use_silu": True, "clip.vision.n_wa_pattern": np.uint32(step)}
    return keys | {EPSILON: np.float32(config.number("rms_norm_eps", 1e-6))}


def _qwen3vl(config: Config, vision: Config, processor: Config) -> Keys:
    text = config.section("text_config")
    indexes = vision.get("deepstack_visual_indexes", [])
    flags = np.array([i in indexes for i in range(vision.integer("depth"))], bool)
    keys: Keys = {"clip.use_gelu": True, EPSILON: np.float32(text.number("rms_norm_eps", 1e-6))}
    if vision.get("spatial_merge_size") is not None:
        keys["clip.vision.spatial_merge_size"] = np.uint32(vision.integer("spatial_merge_size"))
    return keys | {"clip.vision.is_deepstack_layers": flags}


def _glm4v(config: Config, vision: Config, processor: Config) -> Keys:
    return _activation(vision) | {EPSILON: np.float32(vision.number("rms_norm_eps", 1e-5))}


def _gemma3(config: Config, vision: Config, processor: Config) -> Keys:
    keys: Keys = {EPSILON: np.float32(vision.number("layer_norm_eps", 1e-6)), "clip.use_gelu": True}
    side = int(processor.integer("image_seq_length", 256) ** 0.5)
    scale = vision.integer("image_size") // vision.integer("patch_size") // side
    if scale > 0 and scale != 4:
        keys["clip.vision.projector.scale_factor"] = np.uint32(scale)
    return keys


def _gemma4v(config: Config, vision: Config, processor: Config) -> Keys:
    if config.get("audio_config") is not None:
        raise config.error("the audio tower of Gemma 4 cannot be converted yet, and a projector file has both")
    return {EPSILON: np.float32(vision.number("layer_norm_eps", 1e-6))}


def _pixtral(config: Config, vision: Config, processor: Config) -> Keys:
    vision.require("model_type", "pixtral", "this tower")
    keys = _activation(vision) | {EPSILON: np.float32(vision.number("layer_norm_eps", 1e-5))}
    if config.get("spatial_merge_size") is not None:
        keys["clip.vision.spatial_merge_size"] = np.uint32(config.integer("spatial_merge_size"))
    return keys


def _activation(vision: Config) -> Keys:
    act = vision.get("hidden_act")
    if act not in ACTIVATIONS:
        raise vision.error(f"hidden_act is {act!r:.40}; silu and gelu can be converted")
    return {ACTIVATIONS[act]: True}


KEYS: dict[str, Callable[[Config, Config, Config], Keys]] = {
    "qwen2vl_merger": _qwen2vl,
    "qwen2.5vl_merger": _qwen25vl,
    "qwen3vl_merger": _qwen3vl,
    "glm4v": _glm4v,
    "gemma3": _gemma3,
    "gemma4v": _gemma4v,
    "pixtral": _pixtral,
}
