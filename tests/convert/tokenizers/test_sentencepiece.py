"""SentencePiece's model files and unigram models: token ids must be those of the original library."""

import io
import json

import numpy as np
import pytest
from tokenizer_texts import BROKEN, CORPUS, NASTY, read, with_replacements
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers

from ggufmill.convert.tokenizers.tokenizer_json import _sentencepiece_keys
from ggufmill.formats import FormatError
from ggufmill.formats.metadata_values import BYTE, CONTROL, UNKNOWN, UNUSED, USER_DEFINED
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer


def train_sentencepiece(model_type, **options):
    sentencepiece = pytest.importorskip("sentencepiece")
    file = io.BytesIO()
    options |= {"vocab_size": 700, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(CORPUS), model_writer=file, model_type=model_type, **options
    )
    return file.getvalue()


def library(data):
    return pytest.importorskip("sentencepiece").SentencePieceProcessor(model_proto=data)


# As Llama 2's tokenizer.model
LLAMA = {"byte_fallback": True, "normalization_rule_name": "identity", "remove_extra_whitespaces": False}
LLAMA |= {"split_digits": True, "allow_whitespace_only_pieces": True, "character_coverage": 0.99}


@pytest.mark.parametrize("prefix", [True, False])
def test_sentencepiece_bpe(tmp_path, prefix):
    data = train_sentencepiece("bpe", **LLAMA, add_dummy_prefix=prefix, user_defined_symbols=["<tool>"])
    theirs = library(data)
    (tmp_path / "tokenizer.model").write_bytes(data)
    keys, notes = read(tmp_path, 705, {"added_tokens_decoder": {"702": {"content": "<|user|>", "special": True}}})
    assert notes == []
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.add_space_prefix"]) == ("llama", prefix)
    assert (keys["tokenizer.ggml.bos_token_id"], keys["tokenizer.ggml.eos_token_id"]) == (1, 2)
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, False)
    types = keys["tokenizer.ggml.token_type"]
    assert types[[0, 1, 700, 702]].tolist() == [UNKNOWN, CONTROL, UNUSED, CONTROL]
    assert (types == BYTE).sum() == 256
    assert types[keys["tokenizer.ggml.tokens"].index("<tool>")] == USER_DEFINED
    assert np.array_equal(keys["tokenizer.ggml.scores"][:700], np.float32([theirs.get_score(i) for i in range(700)]))
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        assert ours.encode(text, add_special=False) == theirs.encode(text), text
    text = b"broken \xff\xfe\xc3".decode("utf-8", "surrogateescape")
    assert bytes(b"".join(ours.piece(i) for i in ours.encode(text, add_special=False))).strip() == b"broken \xff\xfe\xc3"


@pytest.mark.parametrize("options", [{}, {"byte_fallback": True}, LLAMA, {"normalization_rule_name": "nfkc_cf"}])
def test_sentencepiece_unigram(tmp_path, options):
    data = train_sentencepiece("unigram", **options, pad_id=3)
    theirs = library(data)
    (tmp_path / "spiece.model").write_bytes(data)
    keys, notes = read(tmp_path, theirs.vocab_size() + 3)
    assert notes == []
    assert keys["tokenizer.ggml.model"] == "t5"
    assert keys["tokenizer.ggml.padding_token_id"] == 3
    assert ("tokenizer.ggml.precompiled_charsmap" in keys) == (options.get("normalization_rule_name") != "identity")
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        assert ours.encode(text, add_special=False) == theirs.encode(text), text
    assert ours.encode("fox") == [*theirs.encode("fox"), 2]
    for raw in BROKEN:
        ids = ours.encode(raw.decode("utf-8", "surrogateescape"), add_special=False)
        if "byte_fallback" in options:
            assert b"".join(map(ours.piece, ids)).strip() == raw.strip()
        else:
            assert ids == theirs.encode(with_replacements(raw))


def test_unigram_of_a_tokenizer_json(tmp_path):
    theirs = Tokenizer(models.Unigram())
    ends = normalizers.Replace(Regex("^ +| +$"), "")
    theirs.normalizer = normalizers.Sequence([ends, normalizers.Replace(Regex(" {2,}"), " ")])
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=["<pad>", "</s>", "<unk>"], unk_token="<unk>", show_progress=False
    )
    theirs.train_from_iterator(CORPUS, trainer)
    saved = json.loads(theirs.to_str())  # with scores of 32 bits, as in every file that came from SentencePiece
    saved["model"]["vocab"] = [[text, float(np.float32(score))] for text, score in saved["model"]["vocab"]]
    (tmp_path / "tokenizer.json").write_text(json.dumps(saved))
    theirs = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    n = theirs.get_vocab_size()
    keys, notes = read(tmp_path, n + 2, {"eos_token": "</s>", "unk_token": "<unk>", "add_eos_token": True})
    assert notes == []
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.add_eos_token"]) == ("t5", True)
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False) == expected, text


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "it has no pieces"),
        (b"\x0a\x7f\x01", "field 1 ends beyond"),
        (b"\x0b", "unknown wire type 3"),
        (b"\xff" * 20, "more than 64 bits"),
        (b"\x0a\x07\x0a\x03a\xffb\x18\x01", "not a SentencePiece model"),
        (b"\x0a\x05\x0a\x01a\x18\x01\x12\x02\x18\x03", "of kind 3; only unigram"),
    ],
)
def test_damaged_sentencepiece_models(tmp_path, data, message):
    (tmp_path / "tokenizer.model").write_bytes(data)
    with pytest.raises(FormatError, match=rf"tokenizer.model: .*{message}"):
        read(tmp_path, 10)


@pytest.mark.parametrize("pattern", [" ", "x"])
def test_a_split_at_spaces_that_are_replaced_before_is_no_loss(pattern):
    """Gemma 3's tokenizer.json: spaces become \u2581 before it is cut at spaces, so that it is never cut."""
    notes = []
    tokenizer = {
        "normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
        "pre_tokenizer": {"type": "Split", "pattern": {"String": pattern}, "behavior": "MergedWithPrevious", "invert": False},
    }
    _sentencepiece_keys(tokenizer, notes)
    assert bool(notes) == (pattern != " ")
