"""A GGUF without a vocabulary is made when that was asked for, and never by mistake."""

import pytest

from ggufmill import convert_model, inspect_checkpoint, quantize_model, run_recipe
from ggufmill.convert import open_source
from ggufmill.errors import FormatError, PlanError
from ggufmill.formats import open_gguf
from ggufmill.quantize.recipes.rules import RecipeError

PROBLEM = "has no tokenizer that can be read (there is no tokenizer.json)"


@pytest.fixture
def bare(tiny_llama, write_checkpoint, tmp_path):
    """A checkpoint without a tokenizer."""
    return write_checkpoint(tmp_path / "bare", *tiny_llama(), vocab=False)


@pytest.mark.parametrize("more", [(), ("--dry-run",)])
@pytest.mark.parametrize(("verb", "types"), [("convert", ()), ("quantize", ("q8_0",))])
def test_a_checkpoint_without_a_tokenizer_is_refused(mill, bare, tmp_path, verb, types, more):
    out = tmp_path / "out.gguf"
    code, printed, err = mill(verb, bare, out, *types, *more)
    assert (code, printed, len(err.splitlines())) == (1, "", 1)
    assert f"{bare} {PROBLEM}" in err
    assert "--no-vocab" in err
    assert not out.exists()


@pytest.mark.parametrize(("verb", "types"), [("convert", ()), ("quantize", ("q8_0",))])
def test_no_vocab_makes_a_file_without_one(mill, bare, tmp_path, verb, types):
    assert mill(verb, bare, tmp_path / "out.gguf", *types, "--no-vocab")[0] == 0
    keys = {key: value for key, value in open_gguf(tmp_path / "out.gguf").metadata.items() if key.startswith("tokenizer.")}
    assert keys == {"tokenizer.ggml.model": "no_vocab"}
    again = mill(
        "quantize", tmp_path / "out.gguf", tmp_path / "again.gguf", "q8_0", "--allow-requantize"
    )  # as the source says, so it stays
    assert again[0] == 0


def test_no_vocab_leaves_a_tokenizer_out(mill, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "whole", *tiny_llama())
    assert mill("convert", folder, tmp_path / "with.gguf")[0] == 0
    assert mill("convert", folder, tmp_path / "without.gguf", "--no-vocab")[0] == 0
    assert "tokenizer.ggml.tokens" in open_gguf(tmp_path / "with.gguf").metadata
    assert "tokenizer.ggml.tokens" not in open_gguf(tmp_path / "without.gguf").metadata
    code, _, err = mill("quantize", tmp_path / "with.gguf", tmp_path / "o.gguf", "q8_0", "--no-vocab")
    assert code == 1
    assert "is a GGUF, whose vocabulary stays" in err


def test_the_library_does_as_the_command(bare, tmp_path):
    for make in (convert_model, quantize_model):
        given = {"type": "q8_0"} if make is quantize_model else {}
        with pytest.raises(FormatError, match="has no tokenizer"):
            make(bare, tmp_path / "a.gguf", **given, dry_run=True)
        assert make(bare, tmp_path / "a.gguf", **given, vocab=False, dry_run=True).status == "planned"
    assert PROBLEM in inspect_checkpoint(bare).problem
    assert open_source(bare).metadata["tokenizer.ggml.model"] == "no_vocab"  # for what only reads
    convert_model(bare, tmp_path / "a.gguf", vocab=False)
    with pytest.raises(PlanError, match="vocabulary stays"):
        open_source(tmp_path / "a.gguf", vocab=False)


def test_a_recipe_says_it_too(bare, tmp_path):
    recipe, quantize = tmp_path / "a.toml", '[quantize]\ntype = "q8_0"\n'
    recipe.write_text(f'[source]\nmodel = "bare"\n{quantize}')
    with pytest.raises(FormatError, match="has no tokenizer"):
        run_recipe(recipe, out=tmp_path / "out")
    recipe.write_text(f'[source]\nmodel = "bare"\n[convert]\nvocab = false\n{quantize}')
    run_recipe(recipe, out=tmp_path / "out")
    assert open_gguf(tmp_path / "out/a.gguf").metadata["tokenizer.ggml.model"] == "no_vocab"
    assert quantize_model(bare, tmp_path / "b.gguf", recipe=recipe, dry_run=True).status == "planned"
    (tmp_path / "text.txt").write_text("a text")
    recipe.write_text(f'[convert]\nvocab = false\n[imatrix]\ntext = "text.txt"\n{quantize}')
    with pytest.raises(RecipeError, match=r"\[imatrix\] text needs the vocabulary"):
        quantize_model(bare, tmp_path / "b.gguf", recipe=recipe)
