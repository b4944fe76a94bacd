"""Tiny checkpoints with vision and audio towers: as transformers saves them, or as the models' own repositories have them."""

import json

import numpy as np
from checkpoint_cases import oracle, randomise
from model_cases.common import COMMON, PLAIN
from safetensors.numpy import save_file

TEXT = COMMON | {"head_dim": 16}
MROPE = PLAIN | {"mrope_section": [2, 3, 3]}
WIDTH, INNER, LAYERS = 32, 48, 3
SIZES = {"hidden_size": WIDTH, "intermediate_size": INNER}
BLOCKS = SIZES | {"num_hidden_layers": LAYERS, "num_attention_heads": 2}
QWEN = SIZES | {"depth": LAYERS, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8}
WHISPER = {
    "d_model": WIDTH,
    "encoder_ffn_dim": INNER,
    "encoder_layers": LAYERS,
    "encoder_attention_heads": 2,
    "num_mel_bins": 128,
}
GEMMA4_TEXT = TEXT | {"global_head_dim": 16, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 0}
GEMMA4_VISION = {"patch_size": 8, "standardize": True, "use_clipped_linears": True, "num_key_value_heads": 2, "head_dim": 16}
GEMMA4_VISION |= BLOCKS | {"global_head_dim": 16, "position_embedding_size": 64, "pooling_kernel_size": 2}
GEMMA4_AUDIO = {"hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 2, "output_proj_dims": INNER}
# class of transformers -> options of its config
TRANSFORMERS = {
    "Gemma3": {"text_config": TEXT, "vision_config": BLOCKS | {"image_size": 32, "patch_size": 8, "vision_use_head": False}},
    "Qwen2_5_VL": {
        "text_config": COMMON | {"rope_parameters": MROPE},
        "vision_config": QWEN | {"fullatt_block_indexes": [1]},
    },
    "Qwen2VL": {
        "text_config": COMMON | {"rope_parameters": MROPE},
        "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
    },
    "Qwen3VL": {
        "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
        "vision_config": QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
    },
    "Glm4v": {
        "text_config": COMMON | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
        "vision_config": QWEN | {"image_size": 32},
    },
    "Mistral3": {
        "text_config": TEXT | {"model_type": "mistral"},
        "vision_config": BLOCKS | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16},
        "multimodal_projector_bias": False,
    },
    "InternVL": {
        "text_config": COMMON | {"model_type": "qwen2"},
        "vision_config": BLOCKS | {"image_size": [32, 32], "patch_size": [8, 8], "attention_bias": True},
    },
    "Gemma4": {
        "text_config": GEMMA4_TEXT,
        "vision_config": GEMMA4_VISION,
        "audio_config": GEMMA4_AUDIO | {"subsampling_conv_channels": [128, 4]},
    },
    "Qwen2Audio": {"text_config": COMMON | {"model_type": "qwen2"}, "audio_config": WHISPER},
    "Voxtral": {
        "text_config": COMMON | {"model_type": "llama"},
        "audio_config": BLOCKS | {"intermediate_size": 128, "num_mel_bins": 128},
        "hidden_size": 64,
    },
}
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}


def save_transformers(family, folder):
    """A tiny model as transformers saves it, with what a processor and a tokenizer say. Returns its tensors, float32."""
    _, transformers = oracle()
    architecture = getattr(transformers, f"{family}ForConditionalGeneration")
    config = architecture.config_class(**TRANSFORMERS[family], tie_word_embeddings=False)
    model = architecture(config)
    limits = [buffer for name, buffer in model.named_buffers() if name.endswith(("_min", "_max"))]
    for i, limit in enumerate(limits):  # infinite in a new model
        limit.fill_((-1) ** (i + 1) * (5 + i / 8))
    kept = [limit.clone() for limit in limits]
    randomise(model)
    for limit, value in zip(limits, kept, strict=True):
        limit.copy_(value)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "[IMG_BREAK]"}]}))
    return {name: x.numpy() for name, x in model.state_dict().items()}


def save_own(name, folder):
    """A tiny checkpoint in the layout of the model's own repository. Returns its tensors, float32."""
    shapes, config, processor = OWN[name]()
    draw = np.random.default_rng(3)
    tensors = {key: (0.3 * draw.standard_normal(shape)).astype(np.float32) for key, shape in shapes.items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    if processor:
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return tensors


def save_tower(name, folder):
    """A checkpoint of either kind."""
    return save_transformers(name, folder) if name in TRANSFORMERS else save_own(name, folder)


def linear(name, rows, columns, bias=True):
    """Shapes of a linear layer."""
    return {f"{name}.weight": (rows, columns)} | ({f"{name}.bias": (rows,)} if bias else {})


def norms(*names):
    """Shapes of norms with biases."""
    return {f"{name}.{part}": (WIDTH,) for name in names for part in ("weight", "bias")}


def text(prefix):
    """A tensor of the text model, which has no place in a projector file."""
    return {f"{prefix}embed_tokens.weight": (96, 64)}


def internvl():
    """InternVL 2.5 and 3 in OpenGVLab's layout."""
    shapes = text("language_model.model.") | {"vision_model.embeddings.class_embedding": (1, 1, WIDTH)}
    shapes["vision_model.embeddings.position_embedding"] = (1, 17, WIDTH)
    shapes |= {"vision_model.embeddings.patch_embedding.weight": (WIDTH, 3, 8, 8)}
    shapes |= {"vision_model.embeddings.patch_embedding.bias": (WIDTH,), "mlp1.0.weight": (128,), "mlp1.0.bias": (128,)}
    shapes |= linear("mlp1.1", 64, 128) | linear("mlp1.3", 64, 64)
    for i in range(LAYERS):
        layer = f"vision_model.encoder.layers.{i}"
        shapes |= linear(f"{layer}.attn.qkv", 3 * WIDTH, WIDTH) | linear(f"{layer}.attn.proj", WIDTH, WIDTH)
        shapes |= linear(f"{layer}.mlp.fc1", INNER, WIDTH) | linear(f"{layer}.mlp.fc2", WIDTH, INNER)
        shapes |= norms(f"{layer}.norm1", f"{layer}.norm2") | {f"{layer}.ls1": (WIDTH,), f"{layer}.ls2": (WIDTH,)}
    vision = BLOCKS | {"image_size": 32, "patch_size": 8, "hidden_act": "gelu", "layer_norm_eps": 1e-6}
    config = {"architectures": ["InternVLChatModel"], "downsample_ratio": 0.5, "max_dynamic_patch": 12}
    return shapes, config | {"llm_config": {"hidden_size": 64}, "vision_config": vision}, PROCESSOR


def moonvit(projector, side):
    """Shapes of Moonshot's tower; projector: names of its norm and two matrices. side: of the grid of positions."""
    shapes = text("language_model.model.") | {"vision_tower.patch_embed.pos_emb.weight": (side, side, WIDTH)}
    shapes |= {"vision_tower.patch_embed.proj.weight": (WIDTH, 3, 14, 14), "vision_tower.patch_embed.proj.bias": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"vision_tower.encoder.blocks.{i}"
        shapes |= linear(f"{layer}.wqkv", 3 * WIDTH, WIDTH) | linear(f"{layer}.wo", WIDTH, WIDTH)
        shapes |= linear(f"{layer}.mlp.fc0", INNER, WIDTH) | linear(f"{layer}.mlp.fc1", WIDTH, INNER)
        shapes |= norms(f"{layer}.norm0", f"{layer}.norm1")
    norm, first, second = projector
    shapes |= norms("vision_tower.encoder.final_layernorm", norm)
    return shapes | linear(first, 128, 128) | linear(second, 64, 128)


def kimi_vl():
    """Kimi-VL in its own layout."""
    projector = [f"multi_modal_projector.{name}" for name in ("pre_norm", "linear_1", "linear_2")]
    config = {"architectures": ["KimiVLForConditionalGeneration"], "text_config": {"hidden_size": 64}}
    return moonvit(projector, 64), config | {"vision_config": BLOCKS | {"patch_size": 14}}, PROCESSOR


def kimi_k25():
    """Kimi-K2.5 in its own layout."""
    projector = [f"mm_projector.{name}" for name in ("pre_norm", "proj.0", "proj.2")]
    vision = {f"vt_{key}": value for key, value in BLOCKS.items()}
    vision |= {"patch_size": 14, "init_pos_emb_height": 16, "init_pos_emb_width": 16, "merge_kernel_size": [2, 2]}
    config = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {"hidden_size": 64}}
    return moonvit(projector, 16), config | {"vision_config": vision}, {"media_proc_cfg": PROCESSOR | {"in_patch_limit": 1024}}


def whisper(tower, norm):
    """Shapes of Whisper's encoder."""
    shapes = {f"{tower}.conv1.weight": (WIDTH, 128, 3), f"{tower}.conv2.weight": (WIDTH, WIDTH, 3)}
    shapes |= norms(f"{tower}.{norm}") | {f"{tower}.conv1.bias": (WIDTH,), f"{tower}.conv2.bias": (WIDTH,)}
    for i in range(LAYERS):
        layer = f"{tower}.layers.{i}"
        for part in ("q_proj", "k_proj", "v_proj", "out_proj"):
            shapes |= linear(f"{layer}.self_attn.{part}", WIDTH, WIDTH, bias=part != "k_proj")
        shapes |= linear(f"{layer}.fc1", INNER, WIDTH) | linear(f"{layer}.fc2", WIDTH, INNER)
        shapes |= norms(f"{layer}.self_attn_layer_norm", f"{layer}.final_layer_norm")
    return shapes


def ultravox():
    """Ultravox 0.5, whose checkpoint has no text model."""
    shapes = whisper("audio_tower", "layer_norm") | {"audio_tower.embed_positions.weight": (1500, WIDTH)}
    shapes |= {"multi_modal_projector.ln_pre.weight": (8 * WIDTH,), "multi_modal_projector.ln_mid.weight": (64,)}
    shapes |= {"multi_modal_projector.linear_1.weight": (128, 8 * WIDTH), "multi_modal_projector.linear_2.weight": (64, 64)}
    config = {"architectures": ["UltravoxModel"], "stack_factor": 8, "hidden_size": 128, "audio_config": WHISPER}
    return shapes, config | {"text_config": {"hidden_size": 64}}, None


def qwen25_omni():
    """Qwen2.5-Omni, with what hears and sees; what speaks is not there."""
    shapes = text("thinker.model.") | whisper("thinker.audio_tower", "ln_post") | linear("thinker.audio_tower.proj", 64, WIDTH)
    shapes |= {"thinker.audio_tower.audio_bos_eos_token.weight": (2, 64)}
    shapes |= {"thinker.visual.patch_embed.proj.weight": (WIDTH, 3, 2, 14, 14), "thinker.visual.merger.ln_q.weight": (WIDTH,)}
    shapes |= linear("thinker.visual.merger.mlp.0", 128, 128) | linear("thinker.visual.merger.mlp.2", 64, 128)
    for i in range(LAYERS):
        layer = f"thinker.visual.blocks.{i}"
        for part in ("q", "k", "v", "proj"):
            shapes |= linear(f"{layer}.attn.{part}", WIDTH, WIDTH)
        shapes |= linear(f"{layer}.mlp.gate_proj", INNER, WIDTH) | linear(f"{layer}.mlp.up_proj", INNER, WIDTH)
        shapes |= linear(f"{layer}.mlp.down_proj", WIDTH, INNER)
        shapes |= {f"{layer}.norm1.weight": (WIDTH,), f"{layer}.norm2.weight": (WIDTH,)}
    vision = QWEN | {"patch_size": 14, "fullatt_block_indexes": [1]}
    thinker = {"vision_config": vision, "audio_config": WHISPER, "text_config": {"hidden_size": 64}}
    return shapes, {"architectures": ["Qwen2_5OmniModel"], "thinker_config": thinker}, PROCESSOR


OWN = {
    "InternVL chat": internvl,
    "Kimi-VL": kimi_vl,
    "Kimi-K2.5": kimi_k25,
    "Ultravox": ultravox,
    "Qwen2.5-Omni": qwen25_omni,
}
