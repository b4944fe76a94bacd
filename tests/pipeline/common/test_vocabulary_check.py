"""Vocabularies that give plain texts other token ids than the tokenizer.json that they were made from are noted."""

import json

import pytest
from tokenizer_texts import CORPUS
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ggufmill import convert_model
from ggufmill.convert import open_source
from ggufmill.pipeline.common.vocabulary_check import TEXTS, vocabulary_differences

TRAINED_ON = [*CORPUS, *TEXTS]
N_VOCAB = 900


def sentencepiece(prefix):
    """As Llama 2's and Yi's; prefix: a step that sets the space before a text."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = ([normalizers.Prepend("▁")] if prefix else []) + [normalizers.Replace(" ", "▁")]
    tokenizer.normalizer = normalizers.Sequence(steps)
    words = [word for text in TRAINED_ON for word in text.replace("\n", "").split(" ")]
    tokens = [f"<0x{b:02X}>" for b in range(256)]
    tokenizer.train_from_iterator(words, trainers.BpeTrainer(vocab_size=500, special_tokens=["<unk>"], show_progress=False))
    saved = json.loads(tokenizer.to_str())
    order = ["<unk>", *tokens, *(t for t in saved["model"]["vocab"] if t != "<unk>")]
    saved["model"]["vocab"] = {text: i for i, text in enumerate(order)}
    return Tokenizer.from_str(json.dumps(saved))


def byte_level(split):
    tokenizer = Tokenizer(models.BPE())
    to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split is None)
    cuts = [] if split is None else [pre_tokenizers.Split(Regex(split), "isolated")]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cuts, to_bytes])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(TRAINED_ON, trainer)
    return tokenizer


def unigram():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(vocab_size=400, unk_token="<unk>", special_tokens=["<unk>"], show_progress=False)
    tokenizer.train_from_iterator(TRAINED_ON, trainer)
    # A GGUF's scores are float32, and training differs from run to run: with scores whose sums are exact in either type, two
    # orders of the same tokens ("\n" and "\n\n") are level in both.
    saved = json.loads(tokenizer.to_str())
    saved["model"]["vocab"] = [[text, round(score * 64) / 64] for text, score in saved["model"]["vocab"]]
    return Tokenizer.from_str(json.dumps(saved))


@pytest.fixture
def checkpoint(tmp_path, write_checkpoint, tiny_llama):
    """write(tokenizer) -> the folder of a model with it."""

    def write(tokenizer):
        folder = write_checkpoint(tmp_path / "model", *tiny_llama(vocab_size=N_VOCAB), vocab=False)
        (folder / "tokenizer.json").write_text(tokenizer.to_str())
        return folder

    return write


@pytest.mark.parametrize("make", [lambda: sentencepiece(True), lambda: sentencepiece(False), lambda: byte_level(None), unigram])
def test_vocabularies_that_a_gguf_can_say_have_no_note(checkpoint, make):
    assert vocabulary_differences(open_source(checkpoint(make()))) == []


def with_digits(normalized):
    tokenizer = sentencepiece(True)
    tokenizer.add_tokens([AddedToken(digit, normalized=normalized) for digit in "0123456789"])
    return tokenizer


def test_added_tokens_that_are_found_after_the_space_was_set(checkpoint, tmp_path, caplog):
    """As Yi's, whose digits are added tokens: the space is set before the whole text, in a GGUF after each of them, too."""
    assert vocabulary_differences(open_source(checkpoint(with_digits(normalized=False)))) == []
    folder = checkpoint(with_digits(normalized=True))
    (note,) = vocabulary_differences(open_source(folder))
    digits = sum(any(c in "0123456789" for c in text) for text in TEXTS)
    assert note.startswith(f"of {len(TEXTS)} plain texts {digits} have other token ids with the GGUF's vocabulary than with ")
    assert "In 2024 it was" in note
    assert "each has an added token in it (this one '0')" in note
    with caplog.at_level("INFO", "ggufmill"):
        convert_model(folder, tmp_path / "x.gguf", dry_run=True)
    assert f"note: {note}" in caplog.messages


def test_an_unknown_rule_for_words(checkpoint):
    source = open_source(checkpoint(byte_level(r"\w{1,2}|\W")))
    assert any("pre-tokenizer of tokenizer.json is unknown" in note for note in source.notes)
    (note,) = vocabulary_differences(source)
    assert "added token" not in note


def test_other_sources_have_no_note(checkpoint, tmp_path, write_checkpoint, tiny_llama):
    folder = checkpoint(sentencepiece(True))
    convert_model(folder, tmp_path / "x.gguf")
    assert vocabulary_differences(open_source(tmp_path / "x.gguf")) == []
    assert vocabulary_differences(open_source(folder, vocab=False)) == []
    assert vocabulary_differences(open_source(write_checkpoint(tmp_path / "plain", *tiny_llama()))) == []
