"""The towers that can be converted: for each the tensors' names, in the checkpoint and in the file.

Names, keys and types of the files are those of llama.cpp (tools/mtmd/clip-impl.h, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..tensor_transforms import add_one
from .rows import Row, frames, pixels_last, rotated, split_qkv


@dataclass(frozen=True)
class Tower:
    """A tower and its projector.

    projector   clip.projector_type; by_modality: it is written as clip.vision.projector_type
    prefixes    beginnings of the tensors' names in checkpoints -> what the rows' sources begin with
    rows        its tensors
    sizes       metadata key without clip.vision. -> keys of vision_config, the first one that is there counts
    float32     parts of sources whose tensors stay f32; float16: that are f16 whatever is asked for
    """

    projector: str
    prefixes: Mapping[str, str]
    rows: tuple[Row, ...]
    sizes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    float32: tuple[str, ...] = ()
    float16: tuple[str, ...] = ()
    by_modality: bool = False


QWEN_PREFIXES = {"model.visual.": "", "visual.": ""}
QWEN_SIZES = {"block_count": ("depth",), "attention.head_count": ("num_heads",)}
ATTENTION = tuple((f"self_attn.{p}_proj", f"attn_{p}") for p in "qkv")


def _block(layer: str, names: Mapping[str, str]) -> tuple[Row, ...]:
    return tuple(Row(f"{layer}.{source}", f"v.blk.{{}}.{name}") for source, name in names.items())


def _qwen_block(qkv: Row, mlp: Mapping[str, str]) -> tuple[Row, ...]:
    names = {"attn.proj": "attn_out", **{f"mlp.{source}": name for source, name in mlp.items()}, "norm1": "ln1", "norm2": "ln2"}
    return (qkv, *_block("blocks.{}", names))


SWIGLU = {"down_proj": "ffn_down", "gate_proj": "ffn_gate", "up_proj": "ffn_up"}
SPLIT = Row("blocks.{}.attn.qkv", "v.blk.{}.attn_", split_qkv)
FUSED = Row("blocks.{}.attn.qkv", "v.blk.{}.attn_qkv")
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
GEMMA4 |= {f"{source}.linear": name for source, name in (*ATTENTION, ("self_attn.o_proj", "attn_out"))}
GEMMA4 |= {f"mlp.{source}.linear": name for source, name in SWIGLU.items()}
PIXTRAL = {"attention_norm": "ln1", "ffn_norm": "ln2", "attention.v_proj": "attn_v", "attention.o_proj": "attn_out"}
PIXTRAL |= {f"feed_forward.{source}": name for source, name in SWIGLU.items()}

QWEN2VL = Tower(
    "qwen2vl_merger",
    QWEN_PREFIXES,
    (*_qwen_block(SPLIT, {"fc1": "ffn_up", "fc2": "ffn_down"}), *QWEN2_MERGER),
    QWEN_SIZES | {"embedding_length": ("embed_dim",), "feed_forward_length": ("hidden_size",)},
)
QWEN25VL = Tower("qwen2.5vl_merger", QWEN_PREFIXES, (*_qwen_block(SPLIT, SWIGLU), *QWEN2_MERGER), QWEN_SIZES)
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
    QWEN_SIZES,
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
    QWEN_SIZES,
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
        *_block("encoder.layers.{}", SIGLIP),
        Row("post_layernorm", "v.post_ln"),
    ),
    float32=("embeddings.",),
    float16=("input_projection",),
)
GEMMA4V = Tower(
    "gemma4v",
    {"model.vision_tower.": "", "model.embed_vision.": "embed_vision."},
    (
        Row("embed_vision.embedding_projection", "mm.input_projection"),
        *_block("encoder.layers.{}", GEMMA4),
        Row("patch_embedder.input_proj", "v.patch_embd", pixels_last),
        Row("patch_embedder.position_embedding_table", "v.position_embd"),
        Row("std_bias", "v.std_bias", optional=True),
        Row("std_scale", "v.std_scale", optional=True),
    ),
    by_modality=True,
)
MISTRAL3 = Tower(
    "pixtral",
    {
        "model.vision_tower.": "",
        "vision_tower.": "",
        "model.multi_modal_projector.": "projector.",
        "multi_modal_projector.": "projector.",
    },
    (
        Row("projector.linear_1", "mm.1"),
        Row("projector.linear_2", "mm.2"),
        Row("projector.norm", "mm.input_norm", optional=True),
        Row("projector.patch_merger.merging_layer", "mm.patch_merger", optional=True),
        Row("ln_pre", "v.pre_ln"),
        Row("patch_conv", "v.patch_embd"),
        Row("transformer.layers.{}.attention.q_proj", "v.blk.{}.attn_q", rotated),
        Row("transformer.layers.{}.attention.k_proj", "v.blk.{}.attn_k", rotated),
        *_block("transformer.layers.{}", PIXTRAL),
    ),
)

# name in config.json's `architectures` -> tower
TOWERS: dict[str, Tower] = {
    "Qwen2VLForConditionalGeneration": QWEN2VL,
    "Qwen2_5_VLForConditionalGeneration": QWEN25VL,
    **dict.fromkeys(("Qwen3VLForConditionalGeneration", "Qwen3VLMoeForConditionalGeneration"), QWEN3VL),
    **dict.fromkeys(("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"), QWEN3VL),
    **dict.fromkeys(("Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration"), GLM4V),
    "Gemma3ForConditionalGeneration": GEMMA3,
    "Gemma4ForConditionalGeneration": GEMMA4V,
    **dict.fromkeys(("Mistral3ForConditionalGeneration", "LlavaForConditionalGeneration"), MISTRAL3),
}
SIZES: dict[str, tuple[str, ...]] = {
    "image_size": ("image_size",),
    "patch_size": ("patch_size",),
    "embedding_length": ("hidden_size",),
    "feed_forward_length": ("intermediate_size",),
    "block_count": ("num_hidden_layers",),
    "attention.head_count": ("num_attention_heads",),
}


def size_keys(tower: Tower) -> Mapping[str, tuple[str, ...]]:
    """Metadata keys without clip.vision. -> keys of vision_config."""
    return SIZES | dict(tower.sizes)


ACTIVATIONS: dict[Any, str] = {"silu": "clip.use_silu", "gelu": "clip.use_gelu"}
