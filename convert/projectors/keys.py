"""Metadata of projector files beyond the sizes: one function per projector, from config.json and preprocessor_config.json."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..config import Config

Keys = dict[str, Any]
ACTIVATIONS: dict[Any, str] = {"silu": "clip.use_silu", "gelu": "clip.use_gelu"}
EPSILON = "clip.vision.attention.layer_norm_epsilon"
AUDIO_EPSILON = "clip.audio.attention.layer_norm_epsilon"
STACK_FACTOR = "clip.audio.projector.stack_factor"
SCALE_FACTOR = "clip.vision.projector.scale_factor"


def qwen2vl(config: Config, vision: Config, processor: Config) -> Keys:
    return {EPSILON: np.float32(config.number("rms_norm_eps", 1e-6))}


def qwen25vl(config: Config, vision: Config, processor: Config) -> Keys:
    """Every n-th block attends to the whole image, the others to windows; another pattern is refused."""
    blocks = vision.get("fullatt_block_indexes")
    step = blocks[0] + 1 if isinstance(blocks, list) and blocks and isinstance(blocks[0], int) else 0
    if not step or blocks != list(range(step - 1, step * len(blocks), step)):
        raise vision.error(f"fullatt_block_indexes is {blocks!r:.60}; every n-th block is needed")
    keys = {"clip.use_silu": True, "clip.vision.n_wa_pattern": np.uint32(step)}
    return keys | {EPSILON: np.float32(config.number("rms_norm_eps", 1e-6))}


def qwen3vl(config: Config, vision: Config, processor: Config) -> Keys:
    text = config.section("text_config")
    indexes = vision.get("deepstack_visual_indexes", [])
    flags = np.array([i in indexes for i in range(vision.integer("depth"))], bool)
    keys: Keys = {"clip.use_gelu": True, EPSILON: np.float32(text.number("rms_norm_eps", 1e-6))}
    if vision.get("spatial_merge_size") is not None:
        keys["clip.vision.spatial_merge_size"] = np.uint32(vision.integer("spatial_merge_size"))
    return keys | {"clip.vision.is_deepstack_layers": flags}


def glm4v(config: Config, vision: Config, processor: Config) -> Keys:
    return _activation(vision) | {EPSILON: np.float32(vision.number("rms_norm_eps", 1e-5))}


def gemma3(config: Config, vision: Config, processor: Config) -> Keys:
    keys: Keys = {EPSILON: np.float32(vision.number("layer_norm_eps", 1e-6)), "clip.use_gelu": True}
    side = int(processor.integer("image_seq_length", 256) ** 0.5)
    scale = vision.integer("image_size") // vision.integer("patch_size") // side
    if scale > 0 and scale != 4:
        keys[SCALE_FACTOR] = np.uint32(scale)
    return keys


def gemma4v(config: Config, vision: Config, processor: Config) -> Keys:
    return {EPSILON: np.float32(vision.number("layer_norm_eps", 1e-6))}


def pixtral(config: Config, vision: Config, processor: Config) -> Keys:
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


def internvl(config: Config, vision: Config, processor: Config) -> Keys:
    keys = _activation(vision) | {EPSILON: np.float32(vision.number("layer_norm_eps"))}
    keys[SCALE_FACTOR] = np.uint32(1 / config.number("downsample_ratio", positive=True))
    for key, name in (("min_dynamic_patch", "preproc_min_tiles"), ("max_dynamic_patch", "preproc_max_tiles")):
        tiles = config.integer(key, 0, minimum=0)
        if tiles:
            keys[f"clip.vision.{name}"] = np.uint32(tiles)
    return keys


def kimivl(config: Config, vision: Config, processor: Config) -> Keys:
    keys: Keys = {"clip.use_gelu": True, SCALE_FACTOR: np.uint32(2)}
    return keys | {EPSILON: np.float32(vision.number("layer_norm_eps", 1e-5))}


def kimik25(config: Config, vision: Config, processor: Config) -> Keys:
    """The grid of position embeddings, and how many patches an image has: 8 at least, in_patch_limit at most."""
    sides = (("height", 64), ("width", 64), ("time", 4))
    keys: Keys = {f"vision.pos_emb_{n}": np.uint32(vision.integer(f"init_pos_emb_{n}", size)) for n, size in sides}
    merged, patch = vision.get("merge_kernel_size", [2, 2]), vision.integer("patch_size", 14) ** 2
    if not isinstance(merged, list) or len(merged) != 2 or merged[0] != merged[1] or not isinstance(merged[0], int):
        raise vision.error(f"merge_kernel_size is {merged!r:.60}; a square of whole numbers is needed")
    keys |= {"clip.use_gelu": vision.get("projector_hidden_act", "gelu") == "gelu", SCALE_FACTOR: np.uint32(merged[0])}
    keys |= {"clip.vision.image_min_pixels": np.uint32(8 * patch)}
    keys |= {"clip.vision.image_max_pixels": np.uint32(processor.integer("in_patch_limit", 16384) * patch)}
    return keys | {EPSILON: np.float32(vision.number("projector_ln_eps", 1e-5))}


def whisper(config: Config, audio: Config, processor: Config) -> Keys:
    keys: Keys = {"clip.audio.num_mel_bins": np.uint32(audio.integer("num_mel_bins"))}
    return keys | {AUDIO_EPSILON: np.float32(audio.number("layer_norm_eps", 1e-5))}


def ultravox(config: Config, audio: Config, processor: Config) -> Keys:
    return whisper(config, audio, processor) | {STACK_FACTOR: np.uint32(config.integer("stack_factor"))}


def voxtral(config: Config, audio: Config, processor: Config) -> Keys:
    return whisper(config, audio, processor) | {STACK_FACTOR: np.uint32(4)}


def gemma4a(config: Config, audio: Config, processor: Config) -> Keys:
    keys: Keys = {"clip.audio.num_mel_bins": np.uint32(audio.integer("input_feat_size", 128))}
    return keys | {AUDIO_EPSILON: np.float32(audio.number("layer_norm_eps", 1e-6))}
