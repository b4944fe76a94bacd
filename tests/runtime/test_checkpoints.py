"""Checkpoints as transformers saves them, through convert and a GGUF file into the runtime: transformers' logits come out.

Every architecture is a row of CASES: a class of transformers and what its config has besides COMMON.
"""

import dataclasses
import math

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ggufmill.convert import open_source
from ggufmill.convert.architectures.registry import ARCHITECTURES
from ggufmill.formats import TYPES, FormatError
from ggufmill.jobs.execute import execute
from ggufmill.jobs.plan import Output, make_plan
from ggufmill.quantize import decode, encode
from ggufmill.runtime import ARCHITECTURES as RUNNABLE
from ggufmill.runtime import load_model

TOLERANCE = 1e-4  # of float32 against float32; logits have a standard deviation of about 1
EXACT = {"exact": True}
LENGTH = 90  # tokens: several times the windows of WINDOW

COMMON = {
    "vocab_size": 288,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}
LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
DYNAMIC = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}  # without effect up to max_position_embeddings
WINDOW = {"sliding_window": 20}
TIED = {"tie_word_embeddings": True}
GEMMA2 = WINDOW | {"head_dim": 24, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 24}
GEMMA3 = WINDOW | {"head_dim": 24, "num_hidden_layers": 7, "query_pre_attn_scalar": 24}
OTHER_PATTERN = ["full_attention", *["sliding_attention"] * 3, "full_attention", *["sliding_attention"] * 2]
GEMMA3_ROPE = {"full_attention": LINEAR | {"rope_theta": 1e6}, "sliding_attention": PLAIN}
TEXT = COMMON | TIED | GEMMA3 | {"rope_parameters": GEMMA3_ROPE}
VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
VISION |= {"image_size": 16, "patch_size": 8}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
DEEPSEEK = {"num_key_value_heads": 4, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "kv_lora_rank": 32}
DEEPSEEK |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 8}
DEEPSEEK |= {"num_experts_per_tok": 2, "topk_group": 2, "n_shared_experts": 2}
DEEPSEEK |= {"rms_norm_eps": 1e-6}  # what the latents' norms have whatever is said here
V3 = {"q_lora_rank": 32, "n_group": 4, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}}
V2_GROUPS = {"q_lora_rank": 32, "n_group": 4, "topk_method": "group_limited_greedy", "routed_scaling_factor": 4.0}
KIMI = {"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 48, "n_group": 1, "topk_group": 1}
KIMI |= {"n_shared_experts": 1, "routed_scaling_factor": 2.827}
KIMI_ROPE = YARN | {"rope_theta": 50000.0, "beta_fast": 1.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
GLM = {"head_dim": 32, "moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1}
GLM |= {"use_qk_norm": True, "attention_bias": True, "rope_parameters": PLAIN | {"partial_rotary_factor": 0.5}}
GLM_GROUPS = {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 2, "n_shared_experts": 2, "norm_topk_prob": False}
GLM_GROUPS |= {"use_qk_norm": False, "attention_bias": False, "routed_scaling_factor": 2.5}
GPT_OSS = WINDOW | {"head_dim": 32, "num_local_experts": 6, "num_experts_per_tok": 3}
GPT_OSS_ROPE = YARN | {"rope_theta": 150000.0, "factor": 32.0}
ERNIE_MOE = {"moe_intermediate_size": 40, "moe_num_experts": 8, "moe_k": 3, "moe_num_shared_experts": 2}
LONG = {"rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 64}
LONG |= {"short_factor": [1.0 + 0.05 * i for i in range(8)], "long_factor": [1.5 + 0.7 * i for i in range(8)]}
HALF = {"partial_rotary_factor": 0.5}
WHOLE = {"sliding_window": None}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 0.5, "residual_multiplier": 0.6, "attention_multiplier": 0.3}
DOTS = {"moe_intermediate_size": 40, "n_routed_experts": 8, "num_experts_per_tok": 3, "first_k_dense_replace": 1} | WHOLE
DOTS |= {"num_key_value_heads": 4, "n_shared_experts": 2, "norm_topk_prob": True, "routed_scaling_factor": 2.5}
MINIMAX = {"head_dim": 32, "num_local_experts": 8, "num_experts_per_tok": 3, "rope_parameters": PLAIN | HALF}
MINICPM = {"num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": 48, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16}
MINICPM |= TIED | {"v_head_dim": 20, "dim_model_base": 32, "rms_norm_eps": 1e-6}
EXAONE4 = WINDOW | {"num_hidden_layers": 5, "sliding_window_pattern": 4}
ALPHA = {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 50.0, "factor": 1.0}

# case -> (class of transformers without ForCausalLM, config besides COMMON[, MLA layout])
CASES = {
    "llama": ("Llama", {"rope_parameters": PLAIN}),
    "llama-biases": ("Llama", TIED | {"attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama-linear": ("Llama", {"rope_parameters": LINEAR}),
    "llama-llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "llama-yarn": ("Llama", {"rope_parameters": YARN}),
    "llama-yarn-factor": ("Llama", {"rope_parameters": YARN | {"attention_factor": 0.8, "beta_fast": 16.0}}),
    "llama-dynamic": ("Llama", {"rope_parameters": DYNAMIC}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 24}),
    "mistral-window": ("Mistral", WINDOW),
    "mixtral": ("Mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None}),
    "mixtral-window": ("Mixtral", WINDOW | {"num_local_experts": 5, "num_experts_per_tok": 3}),
    "qwen2": ("Qwen2", {"rope_parameters": PLAIN}),
    "qwen2-window": ("Qwen2", TIED | WINDOW | {"use_sliding_window": True, "max_window_layers": 1}),
    "qwen2-yarn": ("Qwen2", {"rope_parameters": YARN | {"rope_theta": 1e6}}),
    "qwen2moe": ("Qwen2Moe", EXPERTS | {"shared_expert_intermediate_size": 56, "norm_topk_prob": False}),
    "qwen3": ("Qwen3", {"head_dim": 24, "rope_parameters": PLAIN | {"rope_theta": 1e6}}),
    "qwen3-yarn-tied": ("Qwen3", TIED | {"rope_parameters": YARN}),
    "qwen3moe": ("Qwen3Moe", EXPERTS | {"head_dim": 24, "norm_topk_prob": True}),
    "qwen3moe-unnormalised": ("Qwen3Moe", EXPERTS | {"norm_topk_prob": False}),
    "gemma2": ("Gemma2", TIED | GEMMA2),
    "gemma2-scale": ("Gemma2", TIED | GEMMA2 | {"query_pre_attn_scalar": 64, "final_logit_softcapping": 30.0}),
    "gemma3": ("Gemma3", TIED | GEMMA3 | {"rope_parameters": GEMMA3_ROPE}),
    "gemma3-pattern": ("Gemma3", TIED | GEMMA3 | {"layer_types": OTHER_PATTERN, "query_pre_attn_scalar": 16}),
    "v2-lite": ("DeepseekV2", DEEPSEEK | {"q_lora_rank": None}),
    "v2-groups": ("DeepseekV2", DEEPSEEK | V2_GROUPS, "mainline"),
    "v3": ("DeepseekV3", DEEPSEEK | V3),
    "v3-mainline": ("DeepseekV3", DEEPSEEK | V3, "mainline"),
    "v3-legacy": ("DeepseekV3", DEEPSEEK | V3, "legacy"),
    "kimi-k2": ("DeepseekV3", DEEPSEEK | KIMI | {"rope_parameters": KIMI_ROPE}),
    "glm4moe": ("Glm4Moe", GLM),
    "glm4moe-groups": ("Glm4Moe", GLM | GLM_GROUPS),
    "gpt-oss": ("GptOss", GPT_OSS | {"rope_parameters": GPT_OSS_ROPE | {"truncate": False}}),
    "gpt-oss-rounded": ("GptOss", GPT_OSS | {"rope_parameters": GPT_OSS_ROPE | {"truncate": True}}),
    "gpt-oss-pattern": ("GptOss", GPT_OSS | {"layer_types": OTHER_PATTERN[:3], "rope_parameters": PLAIN}),
    "ernie4_5": ("Ernie4_5", TIED | {"head_dim": 24}),
    "ernie4_5-moe": ("Ernie4_5_Moe", TIED | ERNIE_MOE),
    "ernie4_5-moe-interval": ("Ernie4_5_Moe", ERNIE_MOE | {"moe_layer_interval": 2, "moe_num_shared_experts": 0}),
    "hunyuan-dense": ("HunYuanDenseV1", TIED | {"head_dim": 24, "rope_parameters": ALPHA}),
    "phi3": ("Phi3", WHOLE | {"original_max_position_embeddings": 512}),
    "phi3-window": ("Phi3", WINDOW | {"original_max_position_embeddings": 512}),
    "phi3-long": ("Phi3", WHOLE | {"original_max_position_embeddings": 64, "rope_parameters": LONG}),
    "phi3-partial": ("Phi3", WHOLE | {"original_max_position_embeddings": 512, "rope_parameters": PLAIN | HALF}),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "starcoder2-window": ("Starcoder2", TIED | WINDOW | {"use_bias": False}),
    "command-r": ("Cohere", TIED | {"logit_scale": 0.5, "rope_parameters": PLAIN}),
    "command-r-plus": ("Cohere", TIED | {"use_qk_norm": True, "logit_scale": 0.5}),
    "cohere2": ("Cohere2", TIED | WINDOW | {"num_hidden_layers": 5, "logit_scale": 0.5, "rope_parameters": PLAIN}),
    "olmo2": ("Olmo2", {"rope_parameters": PLAIN}),
    "granite": ("Granite", TIED | GRANITE | {"rope_parameters": PLAIN}),
    "minicpm3": ("MiniCPM3", MINICPM | {"rope_parameters": PLAIN}),
    "minicpm3-long": ("MiniCPM3", MINICPM | {"scale_emb": 3.0, "scale_depth": 0.9, "rope_parameters": LONG}),
    "minimax-m2": ("MiniMaxM2", MINIMAX),
    "exaone4": ("Exaone4", EXAONE4 | {"rope_parameters": PLAIN}),
    "exaone4-whole": ("Exaone4", WHOLE | {"rope_parameters": LLAMA3, "layer_types": ["full_attention"] * 3}),
    "nemotron": ("Nemotron", {"rope_parameters": PLAIN | HALF}),
    "smollm3": ("SmolLM3", TIED | {"num_hidden_layers": 5, "rope_parameters": PLAIN}),
    "seed-oss": ("SeedOss", {"head_dim": 24, "rope_parameters": PLAIN | {"rope_theta": 1e7}}),
    "dots1": ("Dots1", DOTS | {"rope_parameters": PLAIN}),
    "hunyuan-moe": ("HunYuanMoEV1", {"head_dim": 32, "num_experts": 6, "moe_topk": 3, "rope_parameters": ALPHA}),
}  # fmt: skip


# What llama.cpp does otherwise, or not at all.
BEYOND_LLAMA_CPP = {
    "mistral-window": "no windows in this architecture",
    "mixtral-window": "no windows in this architecture",
    "qwen2-window": "no windows in this architecture",
    "phi3-window": "no windows in this architecture",
    "command-r-plus": "heads are normalised in models of 64 layers only",
    "exaone4": "windows in models of 64 layers only",
    "minicpm3": "the published model's factors only",
    "minicpm3-long": "the published model's factors only",
    "starcoder2-window": "no windows in this architecture",
    "qwen3moe-unnormalised": "weights of experts always sum to one",
    "gemma2-scale": "another scale of the scores in models of the published sizes only",
    "gemma3-pattern": "one pattern, and one scale of the scores",
    "v2-groups": "experts are not limited to groups",
    "v2-lite": "not in this layout",
    "v3": "not in this layout",
    "kimi-k2": "not in this layout",
    "gpt-oss": "yarn's ramp begins and ends at whole pairs",
    "ernie4_5-moe-interval": "experts in every layer behind the first ones",
}
COARSE_IN_LLAMA_CPP = ("gemma2", "gemma3", "starcoder2")  # gelu comes from a table of f16


def oracle():
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    torch.set_num_threads(1)  # products this small gain nothing from more
    torch.manual_seed(1)  # of what `randomise` keeps of a new model, such as the mean of its sinks
    return torch, transformers


def randomise(model):
    """Weights of a size that makes logits of order 1, so that a tolerance means something; norms and biases differ."""
    torch, _ = oracle()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            if "inv_freq" in name or "embed_scale" in name:
                continue
            noise = torch.randn(tensor.shape, generator=generator)
            if "bias" in name:
                tensor.copy_(0.2 * noise)
            elif tensor.dim() == 1:
                tensor.copy_(tensor.mean() + 0.2 * noise)  # around 1, or 0 where 1 + weight is what counts
            else:
                tensor.copy_(noise / math.sqrt(tensor.shape[-1]))
    return model.float().eval()


def write_gguf(source, path, types=None):
    """The source as a GGUF of f32, or of other types by name; returns the path and the values that the file holds."""
    outputs, held = [], {}
    for name, tensor in source.tensors.items():
        rows = tensor.shape[1] if len(tensor.shape) > 1 else 1  # of one matrix: a run must not go beyond
        values = np.concatenate([tensor.read(at, at + rows) for at in range(0, tensor.n_rows, rows)])
        kind = TYPES[(types or {}).get(name, "f32")]
        packed = encode(values, kind.name)
        outputs.append(Output(name, tensor.shape, "f32", kind, "test", lambda start, stop, q=packed: q[start:stop]))
        back = decode(packed, kind.name, tensor.shape[0])
        assert np.array_equal(back, values) != (name in (types or {}))
        held[name] = dataclasses.replace(tensor, read=lambda start, stop, x=back: x[start:stop])
    execute(make_plan(outputs, source.metadata, path), threads=1)
    return path, dataclasses.replace(source, tensors=held)


def save_tokenizer(path):
    """Of single bytes, for llama.cpp, which opens no model without."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["hello"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(path))


def convert_case(case, folder):
    """(tokens, logits of transformers for them, path of the GGUF) of a case's random model."""
    torch, transformers = oracle()
    family, options, *layout = CASES[case]
    architecture = getattr(transformers, f"{family}ForCausalLM")
    reference = randomise(architecture(architecture.config_class(**(COMMON | options), attn_implementation="eager")))
    tokens = np.random.default_rng(3).integers(3, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    reference.save_pretrained(folder)
    save_tokenizer(folder / "tokenizer.json")
    source = open_source(folder, mla_layout=layout[0] if layout else "ik")
    return tokens, expected, write_gguf(source, folder / "model.gguf")[0]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_the_logits_of_transformers(tmp_path, case):
    tokens, expected, path = convert_case(case, tmp_path)
    model = load_model(path, **EXACT)
    logits = model.logits(tokens)
    difference = np.abs(logits - expected).max()
    print(f"largest difference {difference:.1e}, standard deviation {expected.std():.2f}")
    assert expected.std() > 0.3  # otherwise the tolerance would say nothing
    assert difference < TOLERANCE
    session = model.session()
    session.feed(tokens[:5])
    for i in range(5, LENGTH):
        assert np.abs(session.feed(tokens[i : i + 1]) - expected[i]).max() < TOLERANCE


@pytest.mark.parametrize("case", [case for case in CASES if case not in BEYOND_LLAMA_CPP])
def test_llama_cpp_computes_the_same(tmp_path, monkeypatch, case):
    """So names and keys are those that it reads, as far as it knows the architecture."""
    llama_cpp = pytest.importorskip("llama_cpp")
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def plain():  # its re-arranged weights fault on some virtual machines
        parameters = defaults()
        parameters.use_extra_bufts = False
        return parameters

    monkeypatch.setattr(llama_cpp.llama_cpp, "llama_model_default_params", plain)
    tokens, expected, path = convert_case(case, tmp_path)
    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 128, "n_threads": 1, "logits_all": True, "type_k": f32, "type_v": f32, "flash_attn": False}
    peer = llama_cpp.Llama(str(path), verbose=False, **options)
    peer.eval(tokens.tolist())
    assert np.abs(np.array(peer.scores[:LENGTH]) - expected).max() < (5e-3 if case in COARSE_IN_LLAMA_CPP else TOLERANCE)


@pytest.mark.parametrize("family", {family: None for family, *_ in CASES.values()})
def test_missing_and_unknown_tensors_are_refused(tmp_path, family):
    _, transformers = oracle()
    safetensors = pytest.importorskip("safetensors.numpy")
    options = next(options for name, options, *_ in CASES.values() if name == family)
    architecture = getattr(transformers, f"{family}ForCausalLM")
    architecture(architecture.config_class(**(COMMON | options))).save_pretrained(tmp_path)
    tensors = safetensors.load_file(tmp_path / "model.safetensors")
    open_source(tmp_path)
    gone = next(name for name in tensors if "layers.2." in name and any(part in name for part in ("down", ".w2.", "c_proj")))
    del tensors[gone]
    added = {f"model.layers.{at}.strange.weight": np.zeros((2, 2), np.float32) for at in (0, 9)}
    safetensors.save_file(tensors | added, tmp_path / "model.safetensors")
    with pytest.raises(FormatError) as error:
        open_source(tmp_path)
    assert f"1 tensors are missing: {gone};" in str(error.value)
    assert f"2 tensors are unknown to this architecture: {', '.join(added)}" in str(error.value)


def test_every_architecture_is_tried():
    """Each that convert knows is in CASES, under the name that transformers has for it, and its graph can be run."""
    tried = {f"{family}ForCausalLM" for family, *_ in CASES.values()}
    others = {"Gemma3ForConditionalGeneration", "ExaoneForCausalLM", "BailingMoeForCausalLM"}  # below
    others |= {name for name, function in ARCHITECTURES.items() if function == "multimodal.text_model"}
    others |= {"Ernie4_5_ForCausalLM"}  # another spelling of Ernie4_5ForCausalLM
    assert set(ARCHITECTURES) - tried == others
    assert len(RUNNABLE) >= 8


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


QUANTISED = {
    "token_embd.weight": "q8_0",
    "output.weight": "q8_0",
    "blk.0.attn_q.weight": "q8_0_r8",  # interleaved: rows only decode in groups of eight
    "blk.0.attn_output.weight": "iq4_nl",
    "blk.0.ffn_gate.weight": "bf16",
    "blk.0.ffn_up.weight": "q6_0",
}


def test_a_gguf_gives_the_logits_of_its_decoded_tensors(tiny, tokens, tmp_path):
    numbers = {k: v if isinstance(v, str | bool) else np.float32(v) for k, v in tiny.metadata.items() if "tokenizer" not in k}
    vocabulary = {k: v for k, v in tiny.metadata.items() if "tokenizer" in k}
    tiny = dataclasses.replace(tiny, metadata=numbers | vocabulary)
    path, held = write_gguf(tiny, tmp_path / "model.gguf", QUANTISED)
    model = load_model(path, **EXACT)
    expected = load_model(held, **EXACT).logits(tokens)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    assert np.abs(load_model(str(path), cache_bytes=0, **EXACT).logits(tokens) - expected).max() < TOLERANCE
    assert np.abs(load_model(tiny, **EXACT).logits(tokens) - expected).max() > 1e-2
    apart = load_model(path).logits(tokens) - expected  # with activations of eight bits
    assert TOLERANCE < apart.std() < 0.01 * expected.std()
    assert model.tokenizer.decode(model.tokenizer.encode("Größe")) == "Größe"
    with pytest.raises(FormatError, match=r"other\.gguf"):
        load_model(tmp_path / "other.gguf")
