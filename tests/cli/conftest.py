"""What several tests of `run` start from."""

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, trainers


@pytest.fixture
def recipe_folder(tiny_llama, write_checkpoint, tmp_path):
    """tmp_path with m, a small checkpoint with a tokenizer of single bytes, and words.txt, a text of 200 tokens."""
    config, tensors = tiny_llama(hidden_size=64, intermediate_size=96, vocab_size=288)
    folder = write_checkpoint(tmp_path / "m", config, {name: 0.2 * x for name, x in tensors.items()})
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(["hello"], trainers.BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    (tmp_path / "words.txt").write_text("".join(chr(97 + i * i % 23) for i in range(200)))
    return tmp_path


@pytest.fixture
def write_recipe(recipe_folder):
    """write_recipe(text, {old: new}): the path of r.toml in that folder, the text with some of its parts replaced."""

    def write(text, changes):
        for old, new in changes.items():
            assert old in text
            text = text.replace(old, new)
        (recipe_folder / "r.toml").write_text(text)
        return recipe_folder / "r.toml"

    return write
