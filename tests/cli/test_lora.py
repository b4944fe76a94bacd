"""--lora of convert, quantize and recipes: bytes are those of a checkpoint that was merged before."""

import numpy as np
import pytest
from adapters import merged, random_factors, write_adapter

from ggufmill.formats import open_gguf

NAMES = {"model.layers.0.mlp.up_proj": (64, 32), "model.layers.1.self_attn.q_proj": (32, 32)}


@pytest.fixture
def models(tmp_path, tiny_llama, write_checkpoint):
    """(checkpoint, adapter, the checkpoint with the adapter merged by hand)."""
    config, tensors = tiny_llama(intermediate_size=64)
    factors = random_factors(NAMES, rank=1)
    base = write_checkpoint(tmp_path / "base", config, tensors)
    done = write_checkpoint(tmp_path / "merged", config, merged(tensors, factors, 2.0))
    return base, write_adapter(tmp_path / "adapter", factors, lora_alpha=2, r=1), done


def same_tensors(a, b):
    a, b = open_gguf(a).tensors, open_gguf(b).tensors
    assert list(a) == list(b)
    return [name for name in a if a[name].type != b[name].type or not np.array_equal(a[name].data, b[name].data)]


def test_a_merged_file_has_the_bytes_of_a_merged_checkpoint(mill, tmp_path, models):
    base, adapter, done = models
    for number, words in enumerate((("convert",), ("quantize", "q8_0"))):
        verb, *types = words
        ours, expected = tmp_path / f"ours{number}.gguf", tmp_path / f"expected{number}.gguf"
        assert mill(verb, base, ours, *types, "--lora", adapter)[0] == 0
        assert mill(verb, done, expected, *types)[0] == 0
        assert same_tensors(ours, expected) == []
    assert mill("quantize", base, tmp_path / "plain.gguf", "q8_0")[0] == 0
    assert same_tensors(tmp_path / "plain.gguf", ours) == ["blk.0.ffn_up.weight", "blk.1.attn_q.weight"]
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[convert]\nlora = "adapter"\n[quantize]\ntype = "q8_0"\n')
    assert mill("quantize", base, tmp_path / "recipe.gguf", "--recipe", recipe)[0] == 0
    assert same_tensors(tmp_path / "recipe.gguf", ours) == []


def test_metadata_say_what_was_merged(mill, tmp_path, models):
    base, adapter, _ = models
    assert mill("convert", base, tmp_path / "once.gguf", "--lora", f"{adapter}=0.5")[0] == 0
    (entry,) = open_gguf(tmp_path / "once.gguf").metadata["ggufmill.lora"]
    assert entry.startswith("adapter=0.5 ")
    assert mill("convert", adapter, tmp_path / "a.gguf", "--base", base)[0] == 0
    assert mill("quantize", tmp_path / "once.gguf", tmp_path / "twice.gguf", "q8_0", "--lora", tmp_path / "a.gguf")[0] == 0
    first, second = open_gguf(tmp_path / "twice.gguf").metadata["ggufmill.lora"]
    assert (first, second.split()[0]) == (entry, "a.gguf")


def test_quantised_weights_are_merged_only_when_asked(mill, tmp_path, models):
    base, adapter, _ = models
    assert mill("quantize", base, tmp_path / "q.gguf", "q8_0")[0] == 0
    assert mill("convert", adapter, tmp_path / "a.gguf", "--base", base)[0] == 0
    words = ("quantize", tmp_path / "q.gguf", tmp_path / "out.gguf", "q8_0", "--lora", tmp_path / "a.gguf")
    code, _, err = mill(*words)
    assert code == 1
    assert "--allow-requantize" in err
    assert mill(*words, "--allow-requantize")[0] == 0
    assert same_tensors(tmp_path / "q.gguf", tmp_path / "out.gguf") == ["blk.0.ffn_up.weight", "blk.1.attn_q.weight"]


def test_options_that_have_nothing_to_act_on(mill, tmp_path, models):
    base, adapter, _ = models
    code, _, err = mill("convert", base, tmp_path / "out.gguf", "--base", base)
    assert (code, "--base does nothing without an adapter" in err) == (2, True)
    code, _, err = mill("convert", adapter, tmp_path / "out.gguf", "--base", base, "--lora", adapter)
    assert (code, "--lora does nothing without a checkpoint" in err) == (2, True)
    code, _, err = mill("convert", adapter, tmp_path / "out.gguf")
    assert (code, "give its config.json with --base" in err) == (1, True)
    for option in (("--split-max-size", "1M"), ("--split-max-tensors", 1), ("--no-tensor-first-split",)):
        code, _, err = mill("convert", adapter, tmp_path / "out.gguf", "--base", base, *option)
        assert (code, f"{option[0]} does nothing without a text model" in err) == (2, True)
    assert not (tmp_path / "out.gguf").exists()
