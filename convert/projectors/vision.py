"""Vision towers: for each the tensors' names, in the checkpoint and in the file.

Names, keys and types of the files are those of llama.cpp (tools/mtmd/clip-impl.h, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ..config import Config
from ..tensor_transforms import add_one
from . import keys
from .rows import Row, frames, matrix, pixels_last, rotated, rotated_pairs, split_qkv
from .tower import ATTENTION, SIZES, Tower, block, clipped, llava_prefixes

QWEN_PREFIXES = {"model.visual.": "", "visual.": ""}
LLAVA_PREFIXES = llava_prefixes("vision_tower.")
QWEN_SIZES = {"block_count": ("depth",), "attention.head_count": ("num_heads",)}


def _qwen_block(qkv: tuple[Row, ...], mlp: Mapping[str, str]) -> tuple[Row, ...]:
    names = {"attn.proj": "attn_out", **{f"mlp.{source}": name for source, name in mlp.items()}, "norm1": "ln1", "norm2": "ln2"}
    return (*qkv, *block("blocks.{}", "v.blk.{}", names))


SWIGLU = {"down_proj": "ffn_down", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
SPLIT = (Row("blocks.{}.attn.qkv", "v.blk.{}.attn_", split_qkv),)
SEPARATE = block("blocks.{}", "v.blk.{}", {f"attn.{part}": f"attn_{part}" for part in "qkv"})
FUSED = (Row("blocks.{}.attn.qkv", "v.blk.{}.attn_qkv"),)
PATCHES = Row("patch_embed.proj", "v.patch_embd", frames)
QWEN2_MERGER = (Row("merger.ln_q", "v.post_ln"), Row("merger.mlp.0", "mm.0"), Row("merger.mlp.2", "mm.2"), PATCHES)
DEEPSTACK = tuple(
    Row(f"deepstack_merger_list.{{}}.{source}", f"v.deepstack.{{}}.{name}", numbers="deepstack", optional=True)
    for source, name in (("linear_fc1", "fc1"), ("linear_fc2", "fc2"), ("norm", "norm"))
)
SIGLIP = {"layer_norm1": "ln1", "layer_norm2": "ln2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
SIGLIP |= {"self_attn.out_proj": "attn_out", **dict(ATTENTION)}
GEMMA4 = {"input_layernorm": "ln1", "pre_feedforward_layernorm": "ln2", "post_attention_layernorm": "attn_post_norm"}
GEMMA4 |= {"post_feedforward_layernorm": "ffn_post_norm", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
GEMMA4_CLIPPED = {**dict(ATTENTION), "self_attn.o_proj": "attn_out", **{f"mlp.{s}": name for s, name in SWIGLU.items()}}
PIXTRAL = {"attention_norm": "ln1", "ffn_norm": "ln2", "attention.v_proj": "attn_v", "attention.o_proj": "attn_out"}
PIXTRAL |= {f"feed_forward.{source}": name for source, name in SWIGLU.items()}

INTERNVL_PROJECTOR = (
    Row("projector.layer_norm", "mm.model.mlp.0"),
    Row("projector.linear_1", "mm.model.mlp.1"),
    Row("projector.linear_2", "mm.model.mlp.3"),
)
INTERNVL_CHAT_BLOCK = {"attn.proj": "attn_out", "attn.q_norm": "attn_q_norm", "attn.k_norm": "attn_k_norm"}
INTERNVL_CHAT_BLOCK |= {"ls1": "ls1", "ls2": "ls2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down", "norm1": "ln1", "norm2": "ln2"}
INTERNVL_BLOCK = {f"attention.{part}_proj": f"attn_{part}" for part in "qkv"}
INTERNVL_BLOCK |= {
    "attention.projection_layer": "attn_out",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
}
INTERNVL_BLOCK |= {"lambda_1": "ls1", "lambda_2": "ls2", "mlp.fc1": "ffn_up", "mlp.fc2": "ffn_down"}
INTERNVL_BLOCK |= {"layernorm_before": "ln1", "layernorm_after": "ln2"}
MOONVIT_BLOCK = {"wo": "attn_out", "norm0": "ln1", "norm1": "ln2", "mlp.fc0": "ffn_up", "mlp.fc1": "ffn_down"}
MOONVIT = (
    Row("patch_embed.proj", "v.patch_embd"),
    *block("encoder.blocks.{}", "v.blk.{}", MOONVIT_BLOCK),
    Row("encoder.final_layernorm", "v.post_ln"),
    Row("projector.pre_norm", "mm.input_norm"),
    Row("projector.linear_1", "mm.1"),
    Row("projector.linear_2", "mm.2"),
)


def _side(default: int) -> Callable[[Config], dict[str, int]]:
    """The side of images where config.json does not say it, as llama.cpp's converter sets it."""
    return lambda section: {"image_size": default}


def _side_of_positions(section: Config) -> dict[str, int]:
    side = section.integer("num_position_embeddings", 2304) ** 0.5
    return {"image_size": int(side * section.integer("patch_size", 16))}


def _side_of_grid(section: Config) -> dict[str, int]:
    return {"image_size": section.integer("init_pos_emb_height", 64) * section.integer("patch_size", 14)}


def _optional(rows: tuple[Row, ...], *names: str) -> tuple[Row, ...]:
    return tuple(replace(row, optional=row.name.endswith(names)) for row in rows)


QWEN2VL = Tower(
    "qwen2vl_merger",
    QWEN_PREFIXES,
    (*_qwen_block(SPLIT, {"fc1": "ffn_up", "fc2": "ffn_down"}), *QWEN2_MERGER),
    keys.qwen2vl,
    sizes=QWEN_SIZES | {"embedding_length": ("embed_dim",), "feed_forward_length": ("hidden_size",)},
    defaults=_side(560),
)
QWEN25VL = Tower(
    "qwen2.5vl_merger",
    QWEN_PREFIXES,
    (*_qwen_block(SPLIT, SWIGLU), *QWEN2_MERGER),
    keys.qwen25vl,
    sizes=QWEN_SIZES,
    defaults=_side(560),
)
QWEN25O = replace(
    QWEN25VL,
    projector="qwen2.5o",
    prefixes={"thinker.visual.": ""},
    rows=(*_qwen_block(SEPARATE, SWIGLU), *QWEN2_MERGER),
    section=("thinker_config", "vision_config"),
)
QWEN3VL = Tower(
    "qwen3vl_merger",
    QWEN_PREFIXES,
    (
        *_qwen_block(FUSED, {"linear_fc1": "ffn_up", "linear_fc2": "ffn_down"}),
        *DEEPSTACK,
        Row("merger.linear_fc1", "mm.0"),
        Row("merger.linear_fc2", "mm.2"),
        Row("merger.norm", "v.post_ln"),
        PATCHES,
        Row("pos_embed", "v.position_embd"),
    ),
    keys.qwen3vl,
    sizes=QWEN_SIZES,
    defaults=_side_of_positions,
)
GLM4V = Tower(
    "glm4v",
    QWEN_PREFIXES,
    (
        *_qwen_block(FUSED, SWIGLU),
        Row("downsample", "mm.patch_merger"),
        Row("embeddings.position_embedding", "v.position_embd"),
        Row("merger.down_proj", "mm.down"),
        Row("merger.gate_proj", "mm.gate"),
        Row("merger.up_proj", "mm.up"),
        Row("merger.proj", "mm.model.fc"),
        Row("merger.post_projection_norm", "mm.post_norm"),
        PATCHES,
        Row("post_conv_layernorm", "v.norm_embd"),
        Row("post_layernorm", "v.post_ln"),
    ),
    keys.glm4v,
    sizes=QWEN_SIZES,
)
GEMMA3 = Tower(
    "gemma3",
    {
        "model.vision_tower.vision_model.": "",
        "vision_tower.vision_model.": "",
        "vision_tower.": "",
        "model.vision_tower.": "",
        "model.multi_modal_projector.": "projector.",
        "multi_modal_projector.": "projector.",
    },
    (
        Row("projector.mm_input_projection_weight", "mm.input_projection"),
        Row("projector.mm_soft_emb_norm", "mm.soft_emb_norm", lambda heads, shape: {"": add_one}),
        Row("embeddings.patch_embedding", "v.patch_embd"),
        Row("embeddings.position_embedding", "v.position_embd"),
        *block("encoder.layers.{}", "v.blk.{}", SIGLIP),
        Row("post_layernorm", "v.post_ln"),
    ),
    keys.gemma3,
    float32=("v.patch_embd.*", "v.position_embd.*"),
    float16=("mm.input_projection.*",),
)
GEMMA4V = Tower(
    "gemma4v",
    {"model.vision_tower.": "", "model.embed_vision.": "embed_vision."},
    (
        Row("embed_vision.embedding_projection", "mm.input_projection"),
        *block("encoder.layers.{}", "v.blk.{}", GEMMA4),
        *clipped("encoder.layers.{}", "v.blk.{}", GEMMA4_CLIPPED),
        Row("patch_embedder.input_proj", "v.patch_embd", pixels_last),
        Row("patch_embedder.position_embedding_table", "v.position_embd"),
        Row("std_bias", "v.std_bias", optional=True, bare=True),
        Row("std_scale", "v.std_scale", optional=True, bare=True),
    ),
    keys.gemma4v,
    defaults=_side(224),
    by_modality=True,
)
MISTRAL3 = Tower(
    "pixtral",
    LLAVA_PREFIXES,
    (
        Row("projector.linear_1", "mm.1"),
        Row("projector.linear_2", "mm.2"),
        Row("projector.norm", "mm.input_norm", optional=True),
        Row("projector.patch_merger.merging_layer", "mm.patch_merger", optional=True),
        Row("ln_pre", "v.pre_ln"),
        Row("patch_conv", "v.patch_embd"),
        Row("transformer.layers.{}.attention.q_proj", "v.blk.{}.attn_q", rotated),
        Row("transformer.layers.{}.attention.k_proj", "v.blk.{}.attn_k", rotated),
        *block("transformer.layers.{}", "v.blk.{}", PIXTRAL),
    ),
    keys.pixtral,
)
INTERNVL_CHAT = Tower(
    "internvl",
    {
        "vision_model.": "",
        "mlp1.0.": "projector.layer_norm.",
        "mlp1.1.": "projector.linear_1.",
        "mlp1.3.": "projector.linear_2.",
    },
    (
        Row("embeddings.class_embedding", "v.class_embd", bare=True),
        Row("embeddings.patch_embedding", "v.patch_embd"),
        Row("embeddings.position_embedding", "v.position_embd"),
        Row("encoder.layers.{}.attn.qkv", "v.blk.{}.attn_", split_qkv),
        *_optional(block("encoder.layers.{}", "v.blk.{}", INTERNVL_CHAT_BLOCK), "q_norm", "k_norm"),
        *INTERNVL_PROJECTOR,
    ),
    keys.internvl,
)
INTERNVL = replace(
    INTERNVL_CHAT,
    prefixes=LLAVA_PREFIXES,
    rows=(
        Row("embeddings.cls_token", "v.class_embd", bare=True),
        Row("embeddings.patch_embeddings.projection", "v.patch_embd"),
        Row("embeddings.position_embeddings", "v.position_embd"),
        *_optional(block("encoder.layer.{}", "v.blk.{}", INTERNVL_BLOCK), "q_norm", "k_norm"),
        *INTERNVL_PROJECTOR,
    ),
)
KIMIVL = Tower(
    "kimivl",
    LLAVA_PREFIXES,
    (
        *MOONVIT,
        Row("patch_embed.pos_emb", "v.position_embd", matrix),
        Row("encoder.blocks.{}.wqkv", "v.blk.{}.attn_", split_qkv),
    ),
    keys.kimivl,
    defaults=_side(64 * 14),
)
KIMIK25 = Tower(
    "kimik25",
    {
        "vision_tower.": "",
        "mm_projector.": "projector.",
        "mm_projector.proj.0.": "projector.linear_1.",
        "mm_projector.proj.2.": "projector.linear_2.",
    },
    (
        *MOONVIT,
        Row("patch_embed.pos_emb", "v.position_embd"),
        Row("encoder.blocks.{}.wqkv", "v.blk.{}.attn_qkv", rotated_pairs),
    ),
    keys.kimik25,
    sizes={key: (f"vt_{names[0]}", *names) for key, names in SIZES.items()},
    defaults=_side_of_grid,
)
