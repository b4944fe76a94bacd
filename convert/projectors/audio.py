"""Audio towers: for each the tensors' names, in the checkpoint and in the file.

Names, keys and types of the files are those of llama.cpp (tools/mtmd/clip-impl.h, gguf-py/gguf/constants.py).
"""

from __future__ import annotations

from functools import partial

import numpy as np

from ..config import Config
from . import keys
from .rows import Row, column, matrix, softplus
from .tower import ATTENTION, Tower, block, clipped, llava_prefixes

WHISPER_LAYER = {"self_attn.out_proj": "attn_out", "self_attn_layer_norm": "ln1", "final_layer_norm": "ln2"}
WHISPER_LAYER |= {**dict(ATTENTION), "fc1": "ffn_up", "fc2": "ffn_down"}
WHISPER_SIZES = {
    "embedding_length": ("hidden_size", "d_model"),
    "feed_forward_length": ("intermediate_size", "encoder_ffn_dim"),
    "block_count": ("num_hidden_layers", "encoder_layers"),
    "attention.head_count": ("num_attention_heads", "encoder_attention_heads"),
}
WHISPER_PREFIXES = llava_prefixes("audio_tower.")
WHISPER_LAYERS = (
    Row("conv1", "a.conv1d.1", column),
    Row("conv2", "a.conv1d.2", column),
    *block("layers.{}", "a.blk.{}", WHISPER_LAYER),
)
WHISPER = (*WHISPER_LAYERS, Row("embed_positions", "a.position_embd"), Row("layer_norm", "a.post_ln"))
TWO_MATRICES = (Row("projector.linear_1", "mm.a.mlp.1"), Row("projector.linear_2", "mm.a.mlp.2"))
ULTRAVOX_NORMS = (
    Row("projector.ln_pre", "mm.a.norm_pre"),
    Row("projector.ln_mid", "mm.a.norm_mid"),
)

GEMMA4 = {"norm_pre_attn": "attn_pre_norm", "norm_post_attn": "attn_post_norm", "norm_out": "ln2"}
GEMMA4 |= {"lconv1d.pre_layer_norm": "conv_norm", "lconv1d.conv_norm": "norm_conv"}
GEMMA4 |= {"self_attn.relative_k_proj": "attn_k_rel"}
GEMMA4_CLIPPED = {**dict(ATTENTION), "self_attn.post": "attn_out"}
GEMMA4_CLIPPED |= {"lconv1d.linear_start": "conv_pw1", "lconv1d.linear_end": "conv_pw2"}
for _part, _suffix in (("feed_forward1", ""), ("feed_forward2", "_1")):
    GEMMA4 |= {f"{_part}.pre_layer_norm": f"ffn_norm{_suffix}", f"{_part}.post_layer_norm": f"ffn_post_norm{_suffix}"}
    GEMMA4_CLIPPED |= {f"{_part}.ffw_layer_1": f"ffn_up{_suffix}", f"{_part}.ffw_layer_2": f"ffn_down{_suffix}"}


def sinusoids(positions: int, section: Config) -> np.ndarray:
    """The position embeddings of Whisper, float32 [positions, d_model]: sines, then cosines."""
    half = section.integer("d_model") // 2
    step = np.float32(np.log(10000.0) / max(1, half - 1))
    rates = np.exp(np.float64(-step * np.arange(half, dtype=np.float32))).astype(np.float32)
    angles = np.float64(np.arange(positions, dtype=np.float32)[:, None] * rates)
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=1).astype(np.float32)


_whisper = partial(Tower, section=("audio_config",), sizes=WHISPER_SIZES, float16=("a.conv1d.*",), audio=True)

QWEN2A = _whisper("qwen2a", WHISPER_PREFIXES, (*WHISPER, Row("projector.linear", "mm.a.fc")), keys.whisper)
ULTRAVOX = _whisper("ultravox", WHISPER_PREFIXES, (*WHISPER, *TWO_MATRICES, *ULTRAVOX_NORMS), keys.ultravox)
VOXTRAL = _whisper("voxtral", WHISPER_PREFIXES, (*WHISPER, *TWO_MATRICES), keys.voxtral)
QWEN25O = Tower(
    "qwen2.5o",
    {"thinker.audio_tower.": ""},
    (*WHISPER_LAYERS, Row("ln_post", "a.post_ln"), Row("proj", "mm.a.fc")),
    keys.whisper,
    ("thinker_config", "audio_config"),
    WHISPER_SIZES,
    computed={"a.position_embd.weight": partial(sinusoids, 1500)},
    ignored=("audio_bos_eos_token.",),
    float16=("a.conv1d.*",),
    audio=True,
)
GEMMA4A = Tower(
    "gemma4a",
    {"model.audio_tower.": "", "model.embed_audio.": "embed_audio."},
    (
        Row("embed_audio.embedding_projection", "mm.a.input_projection"),
        Row("subsample_conv_projection.layer0.conv", "a.conv1d.0"),
        Row("subsample_conv_projection.layer0.norm", "a.conv1d.0.norm"),
        Row("subsample_conv_projection.layer1.conv", "a.conv1d.1"),
        Row("subsample_conv_projection.layer1.norm", "a.conv1d.1.norm"),
        Row("subsample_conv_projection.input_proj_linear", "a.input_projection"),
        Row("layers.{}.lconv1d.depthwise_conv1d", "a.blk.{}.conv_dw", matrix),
        Row("layers.{}.self_attn.per_dim_scale", "a.blk.{}.per_dim_scale", softplus),
        *block("layers.{}", "a.blk.{}", GEMMA4),
        *clipped("layers.{}", "a.blk.{}", GEMMA4_CLIPPED),
        Row("output_proj", "a.pre_encode.out"),
    ),
    keys.gemma4a,
    ("audio_config",),
    defaults=lambda section: {"intermediate_size": 4 * section.integer("hidden_size")},
    float32=("a.conv1d.*", "a.input_projection.*", "a.blk.*.conv_dw.*"),
    by_modality=True,
    audio=True,
)
