"""Projector files of tiny checkpoints that transformers saved: every number of the tower is there under llama.cpp's name."""

import json

import numpy as np
import pytest
from adapters import values
from checkpoint_cases import oracle, randomise
from model_cases.common import COMMON, PLAIN

from ggufmill.convert.projectors.source import open_projector, projector_types
from ggufmill.formats import FormatError, open_gguf

TEXT = COMMON | {"head_dim": 16}
MROPE = PLAIN | {"mrope_section": [2, 3, 3]}
SIZES = {"hidden_size": 32, "intermediate_size": 48}
BLOCKS = SIZES | {"num_hidden_layers": 3, "num_attention_heads": 2}
QWEN = SIZES | {"depth": 3, "num_heads": 2, "out_hidden_size": 64, "patch_size": 8}
# class of transformers -> options of its config, projector, tensors in the file, some of their shapes
MODELS = {
    "Gemma3": (
        {"text_config": TEXT, "vision_config": BLOCKS | {"image_size": 32, "patch_size": 8, "vision_use_head": False}},
        "gemma3",
        55,
        {"mm.input_projection.weight": (64, 32), "v.patch_embd.weight": (8, 8, 3, 32), "v.blk.2.ffn_up.weight": (32, 48)},
    ),
    "Qwen2_5_VL": (
        {"text_config": COMMON | {"rope_parameters": MROPE}, "vision_config": QWEN | {"fullatt_block_indexes": [0, 1, 2]}},
        "qwen2.5vl_merger",
        55,
        {"v.patch_embd.weight.1": (8, 8, 3, 32), "v.blk.1.attn_k.weight": (32, 32), "mm.2.weight": (128, 64)},
    ),
    "Qwen2VL": (
        {
            "text_config": COMMON | {"rope_parameters": MROPE},
            "vision_config": {"depth": 3, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2, "patch_size": 8},
        },
        "qwen2vl_merger",
        56,
        {"v.blk.0.ffn_up.bias": (64,), "v.post_ln.bias": (32,)},
    ),
    "Qwen3VL": (
        {
            "text_config": TEXT | {"rope_parameters": MROPE | {"mrope_interleaved": True}},
            "vision_config": QWEN | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 2]},
        },
        "qwen3vl_merger",
        58,
        {"v.deepstack.2.fc2.weight": (128, 64), "v.blk.1.attn_qkv.weight": (32, 96), "v.position_embd.weight": (32, 16)},
    ),
    "Glm4v": (
        {
            "text_config": COMMON | {"rope_parameters": MROPE | {"partial_rotary_factor": 1.0}},
            "vision_config": QWEN | {"image_size": 32},
        },
        "glm4v",
        35,
        {"mm.patch_merger.weight": (2, 2, 32, 64), "v.norm_embd.weight": (32,)},
    ),
    "Mistral3": (
        {
            "text_config": TEXT | {"model_type": "mistral"},
            "vision_config": BLOCKS | {"model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16},
            "multimodal_projector_bias": False,
        },
        "pixtral",
        34,
        {"mm.patch_merger.weight": (128, 32), "v.token_embd.img_break": (64,)},
    ),
}
PROCESSOR = {"image_mean": [0.5, 0.4, 0.3], "image_std": [0.5, 0.25, 0.2]}


def save(family, folder):
    """The tiny model of a family as transformers saves it, with what a processor and a tokenizer say."""
    _, transformers = oracle()
    architecture = getattr(transformers, f"{family}ForConditionalGeneration")
    config = architecture.config_class(**MODELS[family][0], tie_word_embeddings=False)
    model = randomise(architecture(config))
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 5, "content": "[IMG_BREAK]"}]}))
    return {name: x.numpy() for name, x in model.state_dict().items()}


@pytest.mark.parametrize("family", MODELS)
def test_every_number_of_the_tower_is_in_the_file(tmp_path, family):
    tensors = save(family, tmp_path)
    _, projector, count, shapes = MODELS[family]
    source = open_projector(tmp_path)
    keys = {"general.architecture": "clip", "general.type": "mmproj", "clip.projector_type": projector}
    keys |= {"clip.has_vision_encoder": True, "clip.vision.block_count": 3, "clip.vision.projection_dim": 64}
    assert {key: source.metadata[key] for key in keys} == keys
    assert source.metadata["clip.vision.image_mean"].tolist() == np.float32(PROCESSOR["image_mean"]).tolist()
    assert len(source.tensors) == count
    assert {name: source.tensors[name].shape for name in shapes} == shapes
    got = values(source)
    tower = [x for name, x in tensors.items() if "language_model" not in name and not name.startswith("lm_head")]
    ours = [x for name, x in got.items() if name != "v.token_embd.img_break"]
    stored, written = (np.sort(np.concatenate([x.reshape(-1) for x in many])) for many in (tower, ours))
    if family == "Gemma3":  # one norm is written plus 1
        assert stored.shape == written.shape
    else:
        assert np.array_equal(stored, written)


def test_orders_of_rows_and_frames(tmp_path):
    tensors = save("Qwen2_5_VL", tmp_path / "qwen")
    got = values(open_projector(tmp_path / "qwen"))
    convolution = next(x for name, x in tensors.items() if name.endswith("patch_embed.proj.weight"))
    for frame, name in enumerate(("v.patch_embd.weight", "v.patch_embd.weight.1")):
        assert np.array_equal(got[name].reshape(32, 3, 8, 8), convolution[:, :, frame])
    qkv = next(x for name, x in tensors.items() if name.endswith("blocks.1.attn.qkv.weight"))
    bias = next(x for name, x in tensors.items() if name.endswith("blocks.1.attn.qkv.bias"))
    assert np.array_equal(got["v.blk.1.attn_v.weight"], qkv[64:])
    assert np.array_equal(got["v.blk.1.attn_k.bias"][0], bias[32:64])
    tensors = save("Mistral3", tmp_path / "mistral")
    got = values(open_projector(tmp_path / "mistral"))
    q = next(x for name, x in tensors.items() if name.endswith("layers.0.attention.q_proj.weight"))
    assert np.array_equal(got["v.blk.0.attn_q.weight"].reshape(2, 8, 2, 32), q.reshape(2, 2, 8, 32).swapaxes(1, 2))
    embeddings = next(x for name, x in tensors.items() if name.endswith("embed_tokens.weight"))
    assert np.array_equal(got["v.token_embd.img_break"][0], embeddings[5])


def test_types_are_those_that_llama_cpp_chooses(mill, tmp_path):
    save("Gemma3", tmp_path / "gemma3")
    assert mill("convert", tmp_path / "gemma3", tmp_path / "mmproj.gguf", "--mmproj")[0] == 0
    file = open_gguf(tmp_path / "mmproj.gguf")
    types = {name: tensor.type.name for name, tensor in file.tensors.items()}
    assert (types["v.blk.0.attn_q.weight"], types["mm.input_projection.weight"], types["v.patch_embd.weight"]) == (
        "f16",
        "f16",
        "f32",
    )
    assert file.metadata["general.file_type"] == 1
    save("Qwen3VL", tmp_path / "qwen3vl")
    source = open_projector(tmp_path / "qwen3vl")
    for outtype, expected in (("f16", ("f16", "f16", "f32")), ("q8_0", ("q8_0", "f32", "f32")), ("f32", ("f32",) * 3)):
        chosen, _ = projector_types(source, outtype)
        names = ("v.blk.0.attn_qkv.weight", "v.patch_embd.weight", "v.position_embd.weight")
        assert tuple(chosen[name].name for name in names) == expected


def test_unknown_missing_and_unprepared_towers_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.numpy")
    save("Qwen3VL", tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    prefix = next(name for name in tensors if name.endswith("pos_embed.weight")).removesuffix("pos_embed.weight")
    safetensors.save_file(tensors | {f"{prefix}strange.weight": np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"1 tensors are unknown to this architecture: strange.weight"):
        open_projector(tmp_path)
    del tensors[f"{prefix}blocks.2.norm1.weight"]
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(FormatError, match=r"blocks.2.norm1.weight is missing"):
        open_projector(tmp_path)
    (tmp_path / "preprocessor_config.json").unlink()
    with pytest.raises(FormatError, match=r"preprocessor_config.json is missing"):
        open_projector(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": ["Qwen9VLForConditionalGeneration"]}))
    with pytest.raises(FormatError, match=r"tower of Qwen9VLFor\w+ is not known; the nearest known name is Qwen"):
        open_projector(tmp_path)
