"""Models with LoRA adapters: logits equal those of weights that were merged by hand, whatever type the weights have."""

import numpy as np
import pytest
from adapters import merged, random_factors, write_adapter
from checkpoint_cases import EXACT, TOLERANCE, convert_case, oracle, write_gguf

from ggufmill import compute_imatrix, perplexity
from ggufmill.convert import open_source
from ggufmill.convert.lora.gguf import open_adapter
from ggufmill.formats import FormatError, PlanError
from ggufmill.recipes import FOLDER
from ggufmill.runtime import load_model

MIXTURE = {"mlp.gate": (6, 64), "self_attn.v_proj": (32, 64)}
MIXTURE |= {f"mlp.experts.{e}.{p}_proj": (64, 40) if p == "down" else (40, 64) for e in (0, 2, 5) for p in ("down", "up")}
# case of checkpoint_cases -> modules of layer 1 that the adapter changes
CHANGED = {
    "llama": {"self_attn.q_proj": (64, 64), "self_attn.k_proj": (32, 64), "mlp.gate_proj": (96, 64), "mlp.down_proj": (64, 96)},
    "qwen3moe": MIXTURE,
    "v3": {"self_attn.kv_b_proj": None, "self_attn.q_b_proj": None, "mlp.experts.3.gate_proj": None},
    "qwen35": {"linear_attn.in_proj_qkv": None, "linear_attn.out_proj": None},
}


@pytest.fixture(params=CHANGED)
def case(request, tmp_path, write_checkpoint):
    """(tokens, checkpoint, its GGUF, adapter, its GGUF, logits of the weights with the changes added)."""
    oracle()
    safetensors = pytest.importorskip("safetensors.numpy")
    folder = tmp_path / "base"
    tokens, _, path = convert_case(request.param, folder)
    tensors = safetensors.load_file(folder / "model.safetensors")
    names = {f"model.layers.1.{name}": shape for name, shape in CHANGED[request.param].items()}
    factors = random_factors({name: tensors[f"{name}.weight"].shape for name in names}, rank=3)
    adapter = write_adapter(tmp_path / "adapter", factors)
    (tmp_path / "merged").mkdir()
    (tmp_path / "merged" / "config.json").write_bytes((folder / "config.json").read_bytes())
    safetensors.save_file(merged(tensors, factors, 2.0), tmp_path / "merged" / "model.safetensors")
    (tmp_path / "merged" / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    expected = load_model(open_source(tmp_path / "merged"), **EXACT).logits(tokens)
    file, _ = write_gguf(open_adapter(adapter, folder), tmp_path / "adapter.gguf")
    return tokens, folder, path, adapter, file, expected


def test_logits_are_those_of_merged_weights(case):
    tokens, folder, path, adapter, file, expected = case
    assert np.abs(load_model(path, **EXACT).logits(tokens) - expected).max() > 0.01
    for model, lora in ((path, file), (open_source(folder), adapter), (open_source(folder), file)):
        loaded = load_model(model, lora=[lora], **EXACT)
        assert np.abs(loaded.logits(tokens) - expected).max() < TOLERANCE
    session = loaded.session()
    one_by_one = np.array([session.feed([int(token)]) for token in tokens[:20]])
    assert np.abs(one_by_one - expected[:20]).max() < TOLERANCE
    halves = load_model(path, lora=[f"{file}=0.25", f"{file}=0.75"], **EXACT)
    assert np.abs(halves.logits(tokens) - expected).max() < TOLERANCE


def test_packed_weights_stay_packed_beside_the_products(tmp_path):
    oracle()
    tokens, _, _ = convert_case("llama", tmp_path)
    source = open_source(tmp_path)
    types = {name: "q8_0" for name in source.tensors if "attn" in name and "norm" not in name}
    packed, _ = write_gguf(source, tmp_path / "packed.gguf", types)
    names = {f"model.layers.{i}.self_attn.{p}_proj": (64 if p in "qo" else 32, 64) for i in range(3) for p in "qkvo"}
    adapter = write_adapter(tmp_path / "adapter", random_factors(names))
    file, _ = write_gguf(open_adapter(adapter, tmp_path), tmp_path / "adapter.gguf")
    expected = load_model(open_source(packed, lora=[file]), **EXACT).logits(tokens)
    model = load_model(packed, lora=[file], **EXACT)
    assert np.abs(model.logits(tokens) - expected).max() < TOLERANCE
    assert all(model.source.tensors[name].stored.name == "q8_0" for name in types)
    for settings in ({}, {"repack": True}):
        rounded = load_model(packed, lora=[file], **settings).logits(tokens)
        plain = load_model(packed, **settings).logits(tokens)
        assert np.abs(rounded - expected).mean() < 0.1 * np.abs(rounded - plain).mean()


def test_importance_and_perplexity_of_a_model_with_an_adapter(tmp_path):
    shapes = {f"model.layers.{i}.self_attn.o_proj": None for i in range(2)}
    source, text = open_source(FOLDER / "demo"), FOLDER / "demo" / "heldout.txt"
    shapes = {name: source.tensors[f"blk.{name.split('.')[2]}.attn_output.weight"].shape[::-1] for name in shapes}
    adapter = write_adapter(tmp_path / "adapter", random_factors(shapes), lora_alpha=0.5)
    plain, tuned = (compute_imatrix(FOLDER / "demo", text, n_ctx=64, chunks=1, lora=lora) for lora in ((), (adapter,)))
    assert plain.imatrix.entries.keys() == tuned.imatrix.entries.keys()
    same = [name for name, (sums, _) in plain.imatrix.entries.items() if np.array_equal(sums, tuned.imatrix.entries[name][0])]
    assert "blk.0.attn_output.weight" in same
    assert "blk.1.attn_output.weight" not in same
    result = perplexity(FOLDER / "demo", text, n_ctx=64, chunks=1, lora=[adapter])
    assert result.perplexity != perplexity(FOLDER / "demo", text, n_ctx=64, chunks=1).perplexity
    assert result.as_json()["settings"]["lora"] == (str(adapter),)


def test_adapters_of_other_models_are_refused(tmp_path, tiny_llama, write_checkpoint):
    config, tensors = tiny_llama()
    other = write_checkpoint(tmp_path / "other", config, tensors)
    adapter = write_adapter(tmp_path / "adapter", random_factors({"model.layers.0.mlp.up_proj": (48, 32)}))
    file, _ = write_gguf(open_adapter(adapter, other), tmp_path / "adapter.gguf")
    with pytest.raises(FormatError, match="is for 'llama', .* is 'deepseek2'"):
        load_model(open_source(FOLDER / "demo"), lora=[file])
    with pytest.raises(PlanError, match="setting lora has to be a list"):
        load_model(open_source(other), lora="adapter.gguf")


@pytest.mark.parametrize("family", ["llama", "mixtral", "qwen3moe", "gpt-oss", "phi3"])
def test_peft_computes_the_same(tmp_path, family):
    torch, transformers = oracle()
    peft = pytest.importorskip("peft")
    tokens, before, _ = convert_case(family, tmp_path)
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").float()
    config = peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear", use_rslora=True)
    model, generator = peft.get_peft_model(base, config).eval(), torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, factor in model.named_parameters():
            if "lora_" in name:
                factor.copy_(0.1 * torch.randn(factor.shape, generator=generator))
        expected = model(torch.tensor(tokens[None])).logits[0].numpy()
    model.save_pretrained(tmp_path / "adapter")
    got = load_model(open_source(tmp_path), lora=[tmp_path / "adapter"], **EXACT).logits(tokens)
    assert np.abs(expected - before).max() > 0.1
    assert np.abs(got - expected).max() < TOLERANCE


@pytest.mark.parametrize("family", ["llama", "qwen3moe"])
def test_llama_cpp_computes_the_same(tmp_path, family):
    llama_cpp = pytest.importorskip("llama_cpp")
    tokens, _, path = convert_case(family, tmp_path)
    tensors = open_source(tmp_path).tensors
    parts = [(f"self_attn.{p}_proj", f"attn_{p}.weight") for p in "qkv"]
    shapes = {f"model.layers.{i}.{p}": tensors[f"blk.{i}.{name}"].shape[::-1] for i in (0, 2) for p, name in parts}
    adapter = write_adapter(tmp_path / "adapter", random_factors(shapes))
    file, _ = write_gguf(open_adapter(adapter, tmp_path), tmp_path / "adapter.gguf")
    f32 = llama_cpp.GGML_TYPE_F32
    options = {"n_ctx": 128, "n_threads": 1, "logits_all": True, "type_k": f32, "type_v": f32, "flash_attn": False}
    peer = llama_cpp.Llama(str(path), lora_path=str(file), verbose=False, **options)
    peer.eval(tokens.tolist())
    got = load_model(path, lora=[file], **EXACT).logits(tokens)
    assert np.abs(np.array(peer.scores[: len(tokens)]) - got).max() < TOLERANCE
