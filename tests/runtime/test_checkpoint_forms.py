"""Checkpoints that store tensors otherwise than transformers saves them: other names and orders, stacks, multimodal models."""

import numpy as np
import pytest
from checkpoint_cases import EXACT, LENGTH, TOLERANCE, convert_case, oracle, randomise
from model_cases import CASES
from model_cases.common import COMMON, DYNAMIC, LLAMA3, PLAIN, VISION
from model_cases.decoders import ERNIE_MOE, GLM, LONG, TEXT, WHOLE

from ggufmill.convert import open_source
from ggufmill.formats import FormatError
from ggufmill.runtime import load_model


def other_model(family, options, zeroed="nothing"):
    """(tokens, logits, tensors) of a model of transformers whose numbers a checkpoint of another kind is to give.

    zeroed: part of the names of tensors that are 0.
    """
    torch, transformers = oracle()
    architecture = getattr(transformers, f"{family}ForCausalLM")
    reference = randomise(architecture(architecture.config_class(**(COMMON | options), attn_implementation="eager")))
    tokens = np.random.default_rng(5).integers(3, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        for name, tensor in reference.state_dict().items():
            if zeroed in name:
                tensor.zero_()
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    return tokens, expected, {name: tensor.numpy() for name, tensor in reference.state_dict().items()}


def test_exaone_is_a_llama_under_other_names(tmp_path, write_checkpoint):
    """transformers has no EXAONE 3: its code is beside the models."""
    tokens, expected, tensors = other_model("Llama", {"rope_parameters": LLAMA3})
    names = {"self_attn.o_proj": "attn.attention.out_proj", "self_attn": "attn.attention", "gate_proj": "c_fc_0"}
    names |= {"up_proj": "c_fc_1", "down_proj": "c_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2"}
    names |= {"model.layers": "transformer.h", "model.embed_tokens": "transformer.wte", "model.norm": "transformer.ln_f"}
    renamed = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        renamed[name] = tensor
    config = {key: value for key, value in COMMON.items() if key not in ("num_hidden_layers", "rms_norm_eps")}
    config |= {"architectures": ["ExaoneForCausalLM"], "num_layers": 3, "layer_norm_epsilon": 1e-5, "rope_theta": 500000.0}
    config |= {"activation_function": "silu", "rope_scaling": {k: v for k, v in LLAMA3.items() if k != "rope_theta"}}
    model = load_model(open_source(write_checkpoint(tmp_path / "exaone", config, renamed)), **EXACT)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE


def test_internlm3_is_a_llama(tmp_path, write_checkpoint):
    """transformers has no class of its own for it. Biases have other keys in the published files than transformers writes."""
    torch, transformers = oracle()
    options = COMMON | {"head_dim": 24, "attention_bias": True, "mlp_bias": True, "rope_parameters": DYNAMIC}
    reference = transformers.AutoModelForCausalLM.from_config(transformers.InternLM3Config(**options))
    reference = randomise(reference)
    tokens = np.random.default_rng(5).integers(3, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    config = COMMON | {"architectures": ["InternLM3ForCausalLM"], "head_dim": 24, "qkv_bias": True, "bias": True}
    config |= {"rope_theta": DYNAMIC["rope_theta"], "rope_scaling": {"rope_type": "dynamic", "factor": DYNAMIC["factor"]}}
    tensors = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    folder = write_checkpoint(tmp_path / "internlm", config, tensors)
    with pytest.raises(FormatError, match="dynamic rotary scaling"):
        open_source(folder)
    model = load_model(open_source(folder, allow_lossy_config=True), **EXACT)  # the scaling is of longer texts only
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE


def test_gemma3n_within_a_multimodal_checkpoint(tmp_path, write_checkpoint):
    """As in the hub's files: layers that share keys and values have matrices for their own, and defaults are left out."""
    _, transformers = oracle()
    family, options = CASES["gemma3n-odd"]
    tokens, expected, tensors = other_model(family, options)
    text = transformers.Gemma3nTextConfig(**(COMMON | options)).to_dict()
    for key in ("layer_types", "rope_parameters", "tie_word_embeddings", "altup_active_idx", "hidden_activation"):
        del text[key]
    text["layer_types"] = options["layer_types"]
    stored = {
        name.replace("model.", "model.language_model."): tensor for name, tensor in tensors.items() if "lm_head" not in name
    }
    stored["model.vision_tower.conv.weight"] = stored["model.audio_tower.conv.weight"] = np.zeros((2, 2), np.float32)
    for part, source in (("k_proj", 3), ("v_proj", 3), ("k_norm", 3)):
        prefix = "model.language_model.layers.{}.self_attn." + f"{part}.weight"
        stored[prefix.format(5)] = stored[prefix.format(source)]
    config = {"architectures": ["Gemma3nForConditionalGeneration"], "text_config": text}
    source = open_source(write_checkpoint(tmp_path / "gemma", config, stored))
    assert "blk.5.attn_k.weight" in source.tensors
    assert "blk.4.attn_k.weight" not in source.tensors
    assert source.tensors["per_layer_token_embd.weight"].shape == (6 * 16, COMMON["vocab_size"])
    assert sum("tower" in note for note in source.notes) == 2
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE


def halves(matrix, heads):
    """Rows of heads whose neighbours are rotated together, in the order where a head's halves are."""
    parts = matrix.reshape(heads, -1, 2, matrix.shape[-1])
    return np.ascontiguousarray(parts.transpose(0, 2, 1, 3).reshape(matrix.shape))


def test_bailing_is_an_ernie_in_another_order(tmp_path, write_checkpoint):
    """transformers has no Bailing of the first kind: its code is beside the models."""
    options = {"moe_layer_start_index": 0, "rope_parameters": PLAIN, "moe_num_shared_experts": 2}
    tokens, expected, tensors = other_model("Ernie4_5_Moe", ERNIE_MOE | options, "correction_bias")
    found = {"model.word_embeddings.weight": tensors["model.embed_tokens.weight"], "lm_head.weight": tensors["lm_head.weight"]}
    found["model.norm.weight"] = tensors["model.norm.weight"]
    for i in range(3):
        layer = f"model.layers.{i}."
        q, k, v = (tensors[f"{layer}self_attn.{p}_proj.weight"] for p in "qkv")
        found[f"{layer}attention.query_key_value.weight"] = np.concatenate([halves(q, 4), halves(k, 2), v])
        found[f"{layer}attention.dense.weight"] = tensors[f"{layer}self_attn.o_proj.weight"]
        for norm in ("input_layernorm", "post_attention_layernorm"):
            found[f"{layer}{norm}.weight"] = tensors[f"{layer}{norm}.weight"]
        found[f"{layer}mlp.gate.weight"] = tensors[f"{layer}mlp.gate.weight"]
        for p in ("gate", "up", "down"):
            found[f"{layer}mlp.shared_experts.{p}_proj.weight"] = tensors[f"{layer}mlp.shared_experts.{p}_proj.weight"]
        gates, ups = np.split(tensors[f"{layer}mlp.experts.gate_up_proj"], 2, axis=1)
        experts = {"gate": gates, "up": ups, "down": tensors[f"{layer}mlp.experts.down_proj"]}
        for p, stack in experts.items():
            found |= {f"{layer}mlp.experts.{e}.{p}_proj.weight": np.ascontiguousarray(x) for e, x in enumerate(stack)}
    config = COMMON | {"architectures": ["BailingMoeForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3}
    config |= {"num_shared_experts": 2, "moe_intermediate_size": 40, "norm_topk_prob": True, "rope_theta": 10000.0}
    model = load_model(open_source(write_checkpoint(tmp_path / "bailing", config, found)), **EXACT)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    head = found["lm_head.weight"].copy()  # with norm_head (Ling lite and plus) its columns are divided by their lengths
    found["lm_head.weight"] = head * np.linspace(0.5, 2.0, head.shape[1], dtype=np.float32)
    divided = open_source(write_checkpoint(tmp_path / "divided", config | {"norm_head": True}, found)).tensors["output.weight"]
    assert np.abs(divided.read(3, 40) - (head / np.linalg.norm(head, axis=0))[3:40]).max() < 1e-6


def test_ling_2_is_a_glm_under_other_names(tmp_path, write_checkpoint):
    """transformers has no Bailing of the second kind: its code is beside the models."""
    options = GLM | {
        "attention_bias": False,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "routed_scaling_factor": 2.5,
    }
    tokens, expected, tensors = other_model("Glm4Moe", options)
    names = {"model.embed_tokens": "model.word_embeddings", "self_attn.o_proj": "attention.dense"}
    names |= {"self_attn.q_norm": "attention.query_layernorm", "self_attn.k_norm": "attention.key_layernorm"}
    names |= {"mlp.gate.e_score_correction_bias": "mlp.gate.expert_bias"}
    stored = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        if "self_attn" not in name:
            stored[name] = tensor
    for i in range(3):
        parts = [tensors[f"model.layers.{i}.self_attn.{p}_proj.weight"] for p in "qkv"]
        stored[f"model.layers.{i}.attention.query_key_value.weight"] = np.concatenate(parts)
    config = COMMON | {"architectures": ["BailingMoeV2ForCausalLM"], "num_experts": 8, "num_experts_per_tok": 3, "head_dim": 32}
    config |= {"num_shared_experts": 1, "moe_intermediate_size": 40, "norm_topk_prob": True, "rope_theta": 10000.0}
    config |= {"first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}
    config |= {"score_function": "sigmoid", "use_qk_norm": True, "partial_rotary_factor": 0.5}
    model = load_model(open_source(write_checkpoint(tmp_path / "ling", config, stored)), **EXACT)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE


@pytest.mark.parametrize("case", ["qwen3moe", "glm4moe", "dots1"])
def test_experts_in_one_tensor(tmp_path, write_checkpoint, case):
    """As transformers holds them, instead of one by one as it saves them."""
    family, options = CASES[case]
    tokens, expected, tensors = other_model(family, options)
    assert any(name.endswith("experts.gate_up_proj") for name in tensors)
    _, transformers = oracle()
    config = getattr(transformers, f"{family}Config")(**(COMMON | options)).to_dict()
    folder = write_checkpoint(tmp_path / "fused", config | {"architectures": [f"{family}ForCausalLM"]}, tensors)
    source = open_source(folder)
    experts = source.tensors["blk.1.ffn_up_exps.weight"]
    at = experts.shape[1]
    stack = tensors["model.layers.1.mlp.experts.gate_up_proj"]
    assert np.array_equal(experts.read(2 * at + 3, 2 * at + 9), stack[2, at + 3 : at + 9])
    assert experts.raw(2 * at + 3, 2 * at + 9).tobytes() == stack[2, at + 3 : at + 9].tobytes()
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    del tensors["model.layers.1.mlp.experts.gate_up_proj"]
    with pytest.raises(FormatError, match=r"tensors are missing: model.layers.1.mlp.experts.0.gate_proj.weight"):
        open_source(write_checkpoint(tmp_path / "fused", config | {"architectures": [f"{family}ForCausalLM"]}, tensors))


def test_short_texts_have_factors_of_their_own(tmp_path, monkeypatch):
    """LongRoPE: which of the two sets is used depends on the tokens that a session may hold."""
    short = LONG | {"original_max_position_embeddings": 256}
    options = WHOLE | {"original_max_position_embeddings": 256, "rope_parameters": short}
    monkeypatch.setitem(CASES, "phi3-short", ("Phi3", options))
    tokens, expected, path = convert_case("phi3-short", tmp_path)
    assert np.abs(load_model(path, n_ctx=256, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    assert np.abs(load_model(path, n_ctx=257, **EXACT).logits(tokens) - expected).max() > 100 * TOLERANCE


@pytest.mark.parametrize("beginning", ["language_model.model.", "model.language_model."])
def test_the_text_model_of_a_multimodal_checkpoint(tmp_path, write_checkpoint, beginning):
    torch, transformers = oracle()
    config = transformers.Gemma3Config(text_config=TEXT, vision_config=VISION, mm_tokens_per_image=4)
    reference = randomise(transformers.Gemma3ForConditionalGeneration(config))
    tokens = np.random.default_rng(4).integers(3, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    text = config.to_dict() | {"architectures": ["Gemma3ForConditionalGeneration"]}
    # As in the files of the hub: what the model's own code knows is left out, and rotary settings are spelt the older way.
    for key in ("layer_types", "tie_word_embeddings", "hidden_activation", "attn_logit_softcapping", "rope_parameters"):
        text["text_config"].pop(key, None)
    text["text_config"]["rope_scaling"] = {"rope_type": "linear", "factor": 4.0}
    tensors = {}
    for name, tensor in reference.state_dict().items():
        if name != "lm_head.weight":
            tensors[name.replace("model.language_model.", beginning)] = tensor.numpy()
    assert any("vision_tower" in name for name in tensors)
    source = open_source(write_checkpoint(tmp_path / "whole", text, tensors))
    assert any("vision tower" in note and "left out" in note for note in source.notes)
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    tensors["model.norm.weight"] = tensors[f"{beginning}norm.weight"]
    with pytest.raises(FormatError, match=r"norm\.weight and .*norm\.weight are the same tensor"):
        open_source(write_checkpoint(tmp_path / "whole", text, tensors))


SEEN = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 16}


@pytest.mark.parametrize("beginning", ["language_model.model.", "model.language_model."])
def test_the_text_model_between_a_tower_and_a_projector(tmp_path, write_checkpoint, beginning):
    torch, transformers = oracle()
    text = transformers.MistralConfig(**(COMMON | {"sliding_window": None, "head_dim": 24}))
    vision = transformers.CLIPVisionConfig(**SEEN, patch_size=8, projection_dim=16)
    config = transformers.LlavaConfig(text_config=text, vision_config=vision, image_token_index=4)
    reference = randomise(transformers.LlavaForConditionalGeneration(config))
    tokens = np.random.default_rng(6).integers(5, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    head = "language_model.lm_head." if beginning.startswith("language") else "lm_head."
    names = {"model.language_model.": beginning, "lm_head.": head}
    tensors = {}
    for name, tensor in reference.state_dict().items():
        own = next((new + name.removeprefix(old) for old, new in names.items() if name.startswith(old)), name)
        tensors[own] = tensor.numpy()
    whole = config.to_dict() | {"architectures": ["LlavaForConditionalGeneration"]}
    source = open_source(write_checkpoint(tmp_path / "whole", whole, tensors))
    assert {note.split(":")[0] for note in source.notes} >= {"vision tower", "projector of images"}
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    whole["text_config"]["model_type"] = "strange"
    with pytest.raises(FormatError, match="text_config has model_type 'strange'; known are llama, mistral"):
        open_source(write_checkpoint(tmp_path / "whole", whole, tensors))
