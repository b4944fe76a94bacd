"""Adapters: merged weights equal W + scale * b @ a computed by hand before conversion, whatever conversion does to the rows."""

import numpy as np
import pytest
from adapters import merged, random_factors, values, write_adapter

from ggufmill.convert import open_source
from ggufmill.convert.lora.gguf import open_adapter
from ggufmill.convert.lora.load import read_gguf_adapter
from ggufmill.convert.lora.peft_folder import PeftFolder, read_peft_folder
from ggufmill.formats import TYPES, FormatError, PlanError, open_gguf
from ggufmill.jobs import patterns
from ggufmill.jobs.execute import execute
from ggufmill.quantize.fixed_types import plan_types

LAYER = "model.layers.1"
PARTS = {"self_attn.q_proj": (32, 32), "self_attn.k_proj": (16, 32), "self_attn.o_proj": (32, 32), "mlp.down_proj": (32, 48)}
SHAPES = {f"{LAYER}.{name}": shape for name, shape in PARTS.items()} | {"lm_head": (40, 32)}


@pytest.fixture
def llama(tmp_path, write_checkpoint, tiny_llama):
    """write(name, tensors=None) -> (folder of a tiny Llama, its tensors)."""
    config, own = tiny_llama()
    return lambda name="base", tensors=None: (write_checkpoint(tmp_path / name, config, tensors or own), own)


def assert_same(source, expected):
    expected = values(expected)
    got = values(source)
    assert got.keys() == expected.keys()
    for name, x in expected.items():
        assert np.allclose(got[name], x, rtol=0, atol=2e-6 * np.abs(x).max()), name


@pytest.mark.parametrize(
    ("config", "scale"),
    [
        ({}, 6 / 4),
        ({"use_rslora": True}, 6 / 2),
        ({"alpha_pattern": {r"layers\.1\..*|lm_head": 10}}, 10 / 4),
        ({"lora_alpha": 0}, 0),
    ],
)
def test_merged_weights_are_those_of_the_definition(tmp_path, llama, config, scale):
    folder, tensors = llama()
    factors = random_factors(SHAPES)
    adapter = write_adapter(tmp_path / "adapter", factors, **config)
    expected = open_source(llama("merged", merged(tensors, factors, scale))[0])
    source = open_source(folder, lora=[adapter])
    assert_same(source, expected)
    assert any("5 tensors changed" in note for note in source.notes)
    assert source.identity != open_source(folder).identity
    tensor = source.tensors["blk.1.attn_q.weight"]
    assert np.array_equal(tensor.read(3, 7), values(source)["blk.1.attn_q.weight"][3:7])
    assert tensor.raw is None


def test_several_adapters_add_up_each_with_its_factor(tmp_path, llama):
    folder, tensors = llama()
    one, other = random_factors(SHAPES), random_factors(dict(list(SHAPES.items())[1:]), rank=3, seed=2)
    first, second = write_adapter(tmp_path / "one", one), write_adapter(tmp_path / "other", other, lora_alpha=1.5)
    expected = open_source(llama("merged", merged(merged(tensors, one, -0.75), other, 0.5))[0])
    assert_same(open_source(folder, lora=[f"{first}=-0.5", second]), expected)


def test_a_gguf_holds_what_peft_saved_and_changes_a_gguf_likewise(mill, tmp_path, llama):
    folder, tensors = llama()
    factors = random_factors(SHAPES)
    adapter = write_adapter(tmp_path / "adapter", factors, base_model_name_or_path=str(folder))
    assert mill("convert", adapter, tmp_path / "adapter.gguf")[0] == 0
    file = open_gguf(tmp_path / "adapter.gguf")
    keys = {"general.type": "adapter", "general.architecture": "llama", "adapter.type": "lora", "adapter.lora.alpha": 6}
    assert {key: file.metadata[key] for key in keys} == keys
    a, b = (file.tensors[f"blk.1.ffn_down.weight.lora_{part}"] for part in "ab")
    assert (a.shape, b.shape, a.type.name) == ((48, 4), (4, 32), "f32")
    assert np.array_equal(a.data.view(np.float32), factors[f"{LAYER}.mlp.down_proj"][0])
    assert mill("convert", folder, tmp_path / "base.gguf", "--outtype", "f32")[0] == 0
    expected = open_source(llama("merged", merged(tensors, factors, 1.5))[0])
    assert_same(open_source(tmp_path / "base.gguf", lora=[tmp_path / "adapter.gguf"]), expected)
    assert_same(open_source(folder, lora=[tmp_path / "adapter.gguf"]), expected)
    with pytest.raises(PlanError, match="makes a GGUF of the adapter first"):
        open_source(tmp_path / "base.gguf", lora=[adapter])


def test_different_ranks_and_scales_are_in_one_file(tmp_path, llama):
    folder, tensors = llama()
    names = list(SHAPES)
    factors = random_factors({names[0]: SHAPES[names[0]]}, rank=9) | random_factors({names[1]: SHAPES[names[1]]}, rank=1)
    adapter = write_adapter(tmp_path / "adapter", factors, use_rslora=True, alpha_pattern={"q_proj": 5.0})
    source = open_adapter(adapter, folder)
    execute(plan_types(source, tmp_path / "a.gguf", dict.fromkeys(source.tensors, TYPES["f32"])), threads=1)
    changes = read_gguf_adapter(tmp_path / "a.gguf").changes
    assert {name: change.rank for name, change in changes.items()} == {"blk.1.attn_q.weight": 9, "blk.1.attn_k.weight": 1}
    once = merged(tensors, {names[0]: factors[names[0]]}, 5 / 3)
    expected = open_source(llama("merged", merged(once, {names[1]: factors[names[1]]}, 6.0))[0])
    assert_same(open_source(folder, lora=[tmp_path / "a.gguf"]), expected)


@pytest.mark.parametrize("layout", ["ik", "mainline", "legacy"])
def test_matrices_of_latent_attention_and_single_experts(tmp_path, tiny_deepseek, write_checkpoint, layout):
    config, tensors = tiny_deepseek()
    tensors = {name: x.astype(np.float32) for name, x in tensors.items()}
    shapes = {f"{LAYER}.self_attn.kv_b_proj": (112, 48), f"{LAYER}.mlp.experts.1.down_proj": (64, 40)}
    shapes |= {f"{LAYER}.mlp.experts.{e}.up_proj": (40, 64) for e in (0, 3)} | {f"{LAYER}.mlp.gate": (4, 64)}
    factors = random_factors(shapes)
    folder = write_checkpoint(tmp_path / "base", config, tensors)
    adapter = write_adapter(tmp_path / "adapter", factors)
    expected = open_source(write_checkpoint(tmp_path / "merged", config, merged(tensors, factors, 1.5)), mla_layout=layout)
    assert_same(open_source(folder, mla_layout=layout, lora=[adapter]), expected)
    stacks = {name: t.shape for name, t in open_adapter(adapter, folder, layout).tensors.items() if "_exps" in name}
    assert stacks["blk.1.ffn_up_exps.weight.lora_a"] == (64, 4, 4)
    assert stacks["blk.1.ffn_down_exps.weight.lora_b"] == (4, 64, 4)


def test_embeddings_are_changed_where_the_output_is_another_tensor(tmp_path, llama, tiny_llama, write_checkpoint):
    folder, tensors = llama()
    a, b = random_factors({"model.embed_tokens": (32, 40)})["model.embed_tokens"]  # of the transposed table
    names = {f"base_model.model.model.embed_tokens.lora_embedding_{p}": x for p, x in (("A", a), ("B", b))}
    adapter = write_adapter(tmp_path / "adapter", {}, names)
    expected = open_source(llama("merged", merged(tensors, {"model.embed_tokens": (b.T, a.T)}, 1.5))[0])
    assert_same(open_source(folder, lora=[adapter]), expected)
    shapes = {name: t.shape for name, t in open_adapter(adapter, folder).tensors.items()}
    assert shapes == {"token_embd.weight.lora_a": (4, 40), "token_embd.weight.lora_b": (4, 32)}
    config, own = tiny_llama(tie_word_embeddings=True)
    tied = write_checkpoint(tmp_path / "tied", config, own)
    with pytest.raises(FormatError, match="which this model's output shares"):
        open_source(tied, lora=[adapter])
    with pytest.raises(FormatError, match="changes lm_head, which shares the embeddings"):
        open_source(tied, lora=[write_adapter(tmp_path / "head", random_factors({"lm_head": (40, 32)}))])


@pytest.mark.parametrize(
    ("config", "extra", "problem"),
    [
        ({"peft_type": "LOHA"}, {}, "peft_type is 'LOHA'; only LORA"),
        ({"use_dora": True}, {}, "use_dora is set"),
        ({"alpha_pattern": {"(": 3}}, {}, "no regular expression"),
        ({"rank_pattern": {"a)|b(c": 3, "(?i": 4}}, {}, "no regular expression"),
        ({"lora_alpha": "six"}, {}, "lora_alpha is 'six'"),
        ({}, {"model.lm_head.modules_to_save.weight": (2, 2)}, "a module that was trained as a whole"),
        ({}, {"base_model.model.model.embed_tokens.weight": (40, 32)}, "embeddings that were trained as a whole"),
        ({}, {f"base_model.model.{LAYER}.mlp.up_proj.lora_A.weight": (4, 32)}, "lora_A only"),
        ({}, {f"base_model.model.{LAYER}.mlp.up_proj.lora_{p}.weight": (4, 4, 4) for p in "AB"}, "only adapters of matrices"),
        ({}, {f"base_model.model.{LAYER}.mlp.up_proj.lora_{p}.weight": (4, 5) for p in "AB"}, "do not fit together"),
        ({}, {f"base_model.model.{LAYER}.mlp.up_proj.lora_{p}.weight": (4, 4) for p in "AB"}, r"changes 4 x 4, the model has"),
        ({}, {f"base_model.model.model.layers.7.mlp.up_proj.lora_{p}.weight": (4, 4) for p in "AB"}, "the model does not have"),
    ],
)
def test_what_no_gguf_can_say_is_refused_by_name(tmp_path, llama, config, extra, problem):
    tensors = {name: np.ones(shape, np.float32) for name, shape in extra.items()}
    adapter = write_adapter(tmp_path / "adapter", random_factors(SHAPES), tensors, **config)
    with pytest.raises(FormatError, match=problem) as error:
        open_source(llama()[0], lora=[adapter])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("key", "use"), [("alpha_pattern", PeftFolder.scale), ("rank_pattern", PeftFolder.experts)])
def test_patterns_of_modules_are_matched_in_bounded_time(tmp_path, monkeypatch, key, use):
    monkeypatch.setattr(patterns, "TIME_LIMIT", 0.05)
    adapter = read_peft_folder(write_adapter(tmp_path / "adapter", random_factors(SHAPES), **{key: {"(.|.|.)+[!?]": 4}}))
    with pytest.raises(PlanError, match=r"takes more than 0\.05 s; write it with fewer repeats"):
        use(adapter, next(iter(adapter.factors.values())), "model.layers.0.mlp.experts.gate_up_proj.weight")


def test_files_that_are_no_adapters_and_bad_factors(tmp_path, llama, mill):
    folder, _ = llama()
    assert mill("convert", folder, tmp_path / "base.gguf")[0] == 0
    for lora, problem in (
        (tmp_path / "base.gguf", "is no LoRA adapter"),
        (folder, "it has no adapter_config.json"),
        (f"{folder}=much", "'much' is no number"),
        (f"{folder}=nan", "cannot be used"),
        (tmp_path / "nothing", "does not exist"),
    ):
        with pytest.raises((FormatError, PlanError), match=problem):
            open_source(folder, lora=[lora])
