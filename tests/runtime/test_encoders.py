"""Encoders as transformers saves them, through convert and a GGUF file into the runtime: transformers' outputs come out."""

import numpy as np
import pytest
from checkpoint_cases import EXACT, TOLERANCE, oracle, randomise, save_tokenizer, write_gguf
from draft_cases import with_draft_block
from encoder_cases import CASES, COMMON, LENGTH, VOCABULARY, convert_encoder, write_modules

from ggufmill.convert import open_source
from ggufmill.formats import FormatError, PlanError
from ggufmill.quantize import gguf_source
from ggufmill.runtime import load_model
from ggufmill.runtime.graph.values import alibi_slopes


def outputs(model, tokens):
    return model.hidden([(model.new_cache(len(tokens)), tokens)])[0]


@pytest.mark.parametrize("case", CASES)
def test_a_checkpoint_gives_the_outputs_of_transformers(tmp_path, case):
    tokens, expected, dense, path = convert_encoder(case, tmp_path)
    model = load_model(path, **EXACT)
    assert expected.std() > 0.3
    assert np.abs(outputs(model, tokens) - expected).max() < TOLERANCE
    with_draft = load_model(with_draft_block(gguf_source(path)), **EXACT)  # which is never run as a layer of the model
    assert np.abs(outputs(with_draft, tokens) - expected).max() < TOLERANCE
    # Several sequences in one pass, more tokens than `ubatch`.
    small = load_model(path, ubatch=16, **EXACT)
    both = small.hidden([(small.new_cache(LENGTH), tokens), (small.new_cache(9), tokens[:9])])
    assert np.abs(both[0] - expected).max() < TOLERANCE
    assert np.abs(both[1] - outputs(model, tokens[:9])).max() < TOLERANCE
    assert len(dense) == sum(name.startswith("dense_") for name in model.source.tensors)


@pytest.mark.parametrize("case", ["bert", "gemma-embedding", "qwen3-embedding"])
def test_it_predicts_nothing(tmp_path, case):
    tokens, *_, path = convert_encoder(case, tmp_path)
    model = load_model(path, **EXACT)
    assert not model.has_head
    with pytest.raises(PlanError, match="it predicts no tokens"):
        model.logits(tokens)
    with pytest.raises(PlanError, match="generates no text"):
        model.session()
    if model.graph.is_causal:
        return
    cache = model.new_cache(20)
    model.hidden([(cache, tokens[:10])])
    with pytest.raises(PlanError, match="a sequence has to be computed as one"):
        model.hidden([(cache, tokens[10:12])])


def test_positions_end(tmp_path):
    *_, path = convert_encoder("xlm-roberta", tmp_path)
    model = load_model(path, **EXACT)
    assert model.graph.n_positions == 126  # 128, of which two are before the first token
    with pytest.raises(PlanError, match="127 tokens, but it has embeddings for 126 positions only"):
        outputs(model, np.full(127, 5))


def test_jina_2_is_a_bert_with_linear_biases(tmp_path, write_checkpoint):
    """Its code is beside the models: Bert with biases of the scores by distance, and a gated feed-forward block."""
    torch, transformers = oracle()
    config = transformers.BertConfig(**(COMMON | {"num_attention_heads": 4, "pad_token_id": 0}), attn_implementation="eager")
    reference = randomise(transformers.BertModel(config))
    size, rows = 64, 96
    draw, gates = np.random.default_rng(1), []
    for layer in reference.encoder.layer:
        gated = torch.tensor(draw.standard_normal((2 * rows, size)).astype(np.float32) / 8)
        gates.append(gated)

        def feed_forward(x, gated=gated):
            gate, up = (x @ gated.T).split(rows, dim=-1)
            return torch.nn.functional.gelu(gate) * up

        layer.intermediate.forward = feed_forward
    reference.embeddings.position_embeddings.weight.data.zero_()
    tokens = np.random.default_rng(3).integers(3, VOCABULARY, LENGTH)
    distance = np.abs(np.arange(LENGTH)[:, None] - np.arange(LENGTH))
    mask = torch.tensor((-alibi_slopes(4, 8.0)[:, None, None] * distance).astype(np.float32)[None])
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None]), attention_mask=mask).last_hidden_state[0].numpy()
    tensors = {name: tensor.numpy() for name, tensor in reference.state_dict().items()}
    renamed = {}
    for name, tensor in tensors.items():
        if "position" in name or "intermediate" in name or "token_type_ids" in name:
            continue
        if ".attention.output" not in name:
            name = name.replace(".output.dense", ".mlp.wo").replace(".output.LayerNorm", ".mlp.layernorm")
        renamed[name] = tensor
    for i, gated in enumerate(gates):
        renamed[f"encoder.layer.{i}.mlp.gated_layers.weight"] = gated.numpy()
    config = COMMON | {"architectures": ["JinaBertForMaskedLM"], "position_embedding_type": "alibi", "type_vocab_size": 2}
    folder = write_checkpoint(tmp_path / "jina", config | {"feed_forward_type": "geglu"}, renamed)
    save_tokenizer(folder / "tokenizer.json")
    write_modules(folder, "mean")
    path, _ = write_gguf(open_source(folder), tmp_path / "jina.gguf")
    assert expected.std() > 0.3
    assert np.abs(outputs(load_model(path, **EXACT), tokens) - expected).max() < TOLERANCE


def nomic_moe(reference, tmp_path, write_checkpoint):
    """The folder of a checkpoint of Nomic Embed 2, of Jina v3's encoder: the same but for the experts of the layers 1, 3, ...,
    which the reference gets."""
    torch, _ = oracle()
    safetensors = pytest.importorskip("safetensors.numpy")
    size, rows, n, used, draw = 64, 96, 6, 2, np.random.default_rng(1)
    reference.save_pretrained(tmp_path / "jina")
    stored = safetensors.load_file(tmp_path / "jina" / "model.safetensors")
    tensors = {name.replace(".mixer.", ".attn."): tensor for name, tensor in stored.items() if "pooler" not in name}
    for i, layer in enumerate(reference.layers):
        if i % 2 == 0:
            continue
        for name in [name for name in tensors if name.startswith(f"encoder.layers.{i}.mlp.")]:
            del tensors[name]
        w1, w2 = (draw.standard_normal((n * rows, size)).astype(np.float32) / 8 for _ in range(2))
        router = draw.standard_normal((n, size)).astype(np.float32) / 8
        prefix = f"encoder.layers.{i}.mlp."
        tensors |= {f"{prefix}experts.mlp.w1": w1, f"{prefix}experts.mlp.w2": w2, f"{prefix}router.layer.weight": router}
        tensors[f"{prefix}experts.bias"] = np.ones(size, np.float32)

        parts = [torch.tensor(part) for part in (w1.reshape(n, rows, size), w2.reshape(n, rows, size), router)]

        def experts(x, parts=parts):
            up, down, router = parts
            weights, chosen = (x @ router.T).softmax(-1).topk(used)
            each = torch.nn.functional.gelu(torch.einsum("bth,erh->bter", x, up))
            out = torch.einsum("bter,erh->bteh", each, down)
            picked = torch.gather(out, 2, chosen[..., None].expand(*chosen.shape, size))
            return (picked * weights[..., None]).sum(2)

        layer.mlp.forward = experts
    config = {
        "architectures": ["NomicBertModel"],
        "n_embd": size,
        "n_inner": rows,
        "n_head": 4,
        "n_layer": 5,
        "n_positions": 128,
    }
    config |= {"vocab_size": VOCABULARY, "activation_function": "gelu", "layer_norm_epsilon": 1e-5, "rotary_emb_base": 20000}
    config |= {"num_experts": n, "moe_top_k": used, "moe_every_n_layers": 2, "type_vocab_size": 1, "prenorm": False}
    config |= dict.fromkeys(("qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias"), True)
    folder = write_checkpoint(tmp_path / "nomic", config, tensors)
    save_tokenizer(folder / "tokenizer.json")
    write_modules(folder, "mean")
    return folder


def test_nomic_2_has_experts_in_every_second_layer(tmp_path, write_checkpoint):
    """transformers has no class for it; its parts are those of Jina v3's encoder and experts of a gelu without gates."""
    torch, transformers = oracle()
    rope = {"rope_type": "default", "rope_theta": 20000.0}
    options = COMMON | {"num_hidden_layers": 5, "rope_parameters": rope, "type_vocab_size": 1}
    reference = randomise(transformers.JinaEmbeddingsV3Model(transformers.JinaEmbeddingsV3Config(**options)))
    source = open_source(nomic_moe(reference, tmp_path, write_checkpoint))
    tokens = np.random.default_rng(3).integers(3, VOCABULARY, LENGTH)
    with torch.no_grad():
        expected = reference(torch.tensor(tokens[None])).last_hidden_state[0].numpy()
    assert any("bias of the experts' sum" in note for note in source.notes)
    keys = ("expert_count", "expert_used_count", "moe_every_n_layers")
    assert [source.metadata[f"nomic-bert-moe.{key}"] for key in keys] == [6, 2, 2]
    path, _ = write_gguf(source, tmp_path / "nomic.gguf")
    model = load_model(path, **EXACT)
    assert expected.std() > 0.3
    assert np.abs(outputs(model, tokens) - expected).max() < TOLERANCE
    assert np.abs(outputs(load_model(path, ubatch=16, **EXACT), tokens) - expected).max() < TOLERANCE


def test_dense_layers_have_to_be_known(tmp_path):
    convert_encoder("gemma-embedding-dense", tmp_path)
    settings = tmp_path / "3_Dense" / "config.json"
    settings.write_text(settings.read_text().replace('"bias": false', '"bias": true'))
    with pytest.raises(FormatError, match="at most two without bias"):
        open_source(tmp_path)
    (tmp_path / "1_Pooling" / "config.json").write_text('{"pooling_mode_max_tokens": true}')
    with pytest.raises(FormatError, match="the pooling is none of those known"):
        open_source(tmp_path)
    (tmp_path / "modules.json").write_text("{}")
    with pytest.raises(FormatError, match="not a list of modules"):
        open_source(tmp_path)
