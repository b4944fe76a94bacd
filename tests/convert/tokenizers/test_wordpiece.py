"""WordPiece, in a vocab.txt or a tokenizer.json: token ids must be those of the original library."""

import pytest
from tokenizer_texts import BROKEN, CORPUS, NASTY, read, with_replacements
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ggufmill.formats.metadata_values import CONTROL, UNUSED
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer


def train_wordpiece():
    theirs = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    theirs.normalizer = normalizers.BertNormalizer(lowercase=True)
    theirs.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    theirs.decoder = decoders.WordPiece()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    theirs.train_from_iterator(CORPUS, trainers.WordPieceTrainer(vocab_size=500, special_tokens=special, show_progress=False))
    theirs.add_special_tokens([AddedToken("[unused0]")])
    return theirs


@pytest.mark.parametrize("file", ["tokenizer.json", "vocab.txt"])
def test_wordpiece(tmp_path, file):
    theirs = train_wordpiece()
    n = theirs.get_vocab_size()
    if file == "tokenizer.json":
        theirs.save(str(tmp_path / file))
    else:
        (tmp_path / file).write_text("".join(f"{theirs.id_to_token(i)}\n" for i in range(n)))
    names = {"cls_token": "[CLS]", "sep_token": "[SEP]", "unk_token": "[UNK]", "pad_token": "[PAD]", "mask_token": "[MASK]"}
    keys, notes = read(tmp_path, n + 1, names if file == "tokenizer.json" else None)
    assert notes == []
    assert keys["tokenizer.ggml.model"] == "bert"
    assert (keys["tokenizer.ggml.cls_token_id"], keys["tokenizer.ggml.seperator_token_id"]) == (2, 3)
    tokens, types = keys["tokenizer.ggml.tokens"], keys["tokenizer.ggml.token_type"]
    assert tokens[2] == "[CLS]"
    assert types[2] == CONTROL
    assert types[n] == UNUSED
    assert tokens[theirs.token_to_id("the")] == "▁the"
    assert tokens[theirs.token_to_id("##e")] == "e"
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == expected, text
    assert ours.encode("the fox") == [2, *theirs.encode("the fox", add_special_tokens=False).ids, 3]
    for raw in BROKEN:
        ids = ours.encode(raw.decode("utf-8", "surrogateescape"), add_special=False)
        assert ids == theirs.encode(with_replacements(raw), add_special_tokens=False).ids, raw


def test_cased_wordpiece_is_noted(tmp_path):
    theirs = train_wordpiece()
    theirs.normalizer = normalizers.BertNormalizer(lowercase=False)
    theirs.save(str(tmp_path / "tokenizer.json"))
    assert any("capitals" in note for note in read(tmp_path, 600)[1])
