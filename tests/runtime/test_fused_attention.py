"""Checkpoints with one matrix for queries, keys and values, of models that transformers has under other names only: Baichuan is
a Llama, ChatGLM a Glm."""

import numpy as np
import pytest
from checkpoint_cases import EXACT, LENGTH, TOLERANCE, oracle, randomise
from model_cases.common import COMMON, PLAIN

from ggufmill.convert import open_source
from ggufmill.runtime import load_model
from ggufmill.runtime.graph.values import alibi_slopes


def model_of(family, options):
    torch, transformers = oracle()
    architecture = getattr(transformers, f"{family}ForCausalLM")
    reference = randomise(architecture(architecture.config_class(**(COMMON | options), attn_implementation="eager")))
    return torch, reference, {name: tensor.numpy() for name, tensor in reference.state_dict().items()}


def renamed(tensors, names):
    out = {}
    for name, tensor in tensors.items():
        for theirs, ours in names.items():
            name = name.replace(theirs, ours)
        out[name] = tensor
    return out


def joined(tensors, layer, parts, name, kind="weight"):
    """Moves the rows of several tensors of a layer into one."""
    prefix = f"model.layers.{layer}.self_attn."
    rows = [tensors.pop(f"{prefix}{part}_proj.{kind}") for part in parts]
    tensors[f"{prefix}{name}.{kind}"] = np.concatenate(rows)


@pytest.mark.parametrize(("vocabulary", "layers"), [(288, 3), (125696, 2), (288, 40)], ids=["7b", "2-7b", "13b"])
def test_baichuan(tmp_path, write_checkpoint, vocabulary, layers):
    """Of 40 layers it has linear biases; its second version, which the vocabulary tells, an output with rows of length 1."""
    options = {"num_key_value_heads": 4, "num_hidden_layers": layers, "vocab_size": vocabulary, "rope_parameters": PLAIN}
    torch, reference, tensors = model_of("Llama", options)
    tokens, inputs = np.random.default_rng(5).integers(3, 288, LENGTH), {}
    if layers == 40:
        distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
        bias = np.where(distance < 0, -1e30, -alibi_slopes(4, 8.0)[:, None, None] * distance).astype(np.float32)
        inputs = {"attention_mask": torch.tensor(bias[None]), "position_ids": torch.zeros(1, LENGTH, dtype=torch.long)}
    with torch.no_grad():
        if vocabulary != 288:
            reference.lm_head.weight /= reference.lm_head.weight.norm(dim=1, keepdim=True)
        expected = reference(torch.tensor(tokens[None]), **inputs).logits[0].numpy()
    tensors["lm_head.weight"] = tensors["lm_head.weight"] * 3
    for layer in range(layers):
        joined(tensors, layer, "qkv", "W_pack")
    config = {key: value for key, value in (COMMON | options).items() if key not in ("rope_parameters", "num_key_value_heads")}
    config |= {"architectures": ["BaichuanForCausalLM"], "hidden_act": "silu", "model_max_length": 512}
    if vocabulary == 288:
        tensors["lm_head.weight"] = tensors["lm_head.weight"] / 3
    source = open_source(write_checkpoint(tmp_path / "baichuan", config, tensors), vocab=vocabulary == 288)
    assert expected.std() > 0.05
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE


@pytest.mark.parametrize("is_shared", [True, False])
def test_chatglm(tmp_path, write_checkpoint, is_shared):
    options = {"head_dim": 16, "attention_bias": is_shared, "num_key_value_heads": 2 if is_shared else 4}
    options |= {"rope_parameters": PLAIN | {"rope_theta": 50000.0, "partial_rotary_factor": 0.5}}
    torch, reference, tensors = model_of("Glm", options)
    tokens = np.random.default_rng(5).integers(3, COMMON["vocab_size"], LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).logits[0].numpy()
    for layer in range(3):
        for kind in ("weight", "bias")[: 1 + is_shared]:
            joined(tensors, layer, "qkv", "query_key_value", kind)
    names = {"self_attn.o_proj": "self_attention.dense", "self_attn": "self_attention", "gate_up_proj": "dense_h_to_4h"}
    names |= {"down_proj": "dense_4h_to_h", "model.embed_tokens": "transformer.embedding.word_embeddings"}
    names |= {"model.norm": "transformer.encoder.final_layernorm", "lm_head": "transformer.output_layer"}
    names |= {"model.layers": "transformer.encoder.layers"}
    config = {"architectures": ["ChatGLMModel"], "num_layers": 3, "hidden_size": 64, "ffn_hidden_size": 96, "kv_channels": 16}
    config |= {
        "num_attention_heads": 4,
        "padded_vocab_size": 288,
        "seq_length": 512,
        "layernorm_epsilon": 1e-5,
        "rmsnorm": True,
    }
    config |= {"multi_query_attention": is_shared, "multi_query_group_num": 2, "add_qkv_bias": is_shared, "rope_ratio": 5}
    source = open_source(write_checkpoint(tmp_path / "chatglm", config, renamed(tensors, names)))
    assert expected.std() > 0.3
    assert np.abs(load_model(source, **EXACT).logits(tokens) - expected).max() < TOLERANCE
