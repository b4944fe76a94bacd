"""Tokenizers in other files than tokenizer.json, and other models in it: token ids must be those of the original libraries."""

import base64
import io
import json
import re
import unicodedata

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from ggufmill.convert.config import Config
from ggufmill.convert.tokenizers.byte_level_bpe import CHARACTERS
from ggufmill.convert.tokenizers.token_list import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ggufmill.convert.tokenizers.vocabulary import read_vocabulary
from ggufmill.formats import FormatError
from ggufmill.formats.pretokenizers import PRE_TOKENIZERS
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer
from ggufmill.runtime.text.vocabulary import byte_characters

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 1234567 other things happened in 2024.",
    "def encode(text: str) -> list[int]: return [ids[t] for t in cut(text)]  # it's what we'll do",
    "Übergrößenträger fährt über die Brücke. Привет, мир! 你好，世界。こんにちは、カタカナ。안녕하세요",
    "if x != y: return None;;; /* don't */ http://example.com/a/b?c=d&e=%20f",
    "mixed123numbers 3.14159 -42 1e-10 0xFF ½ ² ٣٤ हिन्दी ไทย العربية שלום",
] * 4
NASTY = [
    "",
    " ",
    "  leading and trailing   ",
    "two  spaces   three\ttab\nline\r\n\n",
    "Hello, world! It's 2024; we'LL see y'all.",
    "camelCase snake_case SCREAMING iPhone13 x=y+z;;//comment",
    "一龥ࠀ 漢字かなカナ 한국어 混ぜtext123 ＦＵＬＬ　ｗｉｄｔｈ ①Ⅳ",
    "é e\u0301 ﬁ Ω K \u00a0\u3000\u200b zero\u200dwidth 👩‍👩‍👧 🙂🙂",
    "1 12 123 1234 12345678901234567890 1,000.50",
    "a\x7f \ufffd \U0010ffff",
    *CORPUS[:5],
]


def read(folder, vocab_size, settings=None, **config):
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return read_vocabulary(folder, Config(folder / "config.json", config), vocab_size)


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


@pytest.fixture(scope="module")
def ranks():
    """Token -> rank of a small byte-level BPE, as in tiktoken's files."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    byte_of = {character: b for b, character in enumerate(CHARACTERS)}
    merged_texts = [pair[0] + pair[1] for pair in json.loads(trained.to_str())["model"]["merges"]]
    tokens = [bytes([b]) for b in range(255, -1, -1)] + [bytes(byte_of[c] for c in text) for text in merged_texts]
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


def test_byte_characters_equal_the_runtimes():
    assert dict(enumerate(CHARACTERS)) == byte_characters()


# From the code beside Kimi-K2
KIMI = "|".join(
    [
        r"[\p{Han}]+",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@pytest.mark.parametrize(
    ("file", "model_type", "pre"),
    [("tiktoken.model", "kimi_k2", "kimi-k2"), ("qwen.tiktoken", "qwen", "qwen2"), ("tokenizer.model", "llama", "llama-bpe")],
)
def test_tiktoken(tmp_path, ranks, file, model_type, pre):
    tiktoken = pytest.importorskip("tiktoken")
    rule = KIMI if pre == "kimi-k2" else PRE_TOKENIZERS[pre].splits[0]
    n = len(ranks)
    special = {"[BOS]": n, "[EOS]": n + 1, "<|im_end|>": n + 2, "<|tool|>": n + 4}
    theirs = tiktoken.Encoding("test", pat_str=rule, mergeable_ranks=ranks, special_tokens=special)
    (tmp_path / file).write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    added = {str(id): {"content": text, "special": True} for text, id in special.items()}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "{{ x }}<|im_end|>"}
    keys, notes = read(tmp_path, n + 8, settings, model_type=model_type)
    assert notes == []
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", pre)
    assert keys["tokenizer.ggml.eot_token_id"] == n + 2
    assert keys["tokenizer.ggml.token_type"][[0, n - 1, n, n + 3]].tolist() == [NORMAL, NORMAL, CONTROL, UNUSED]
    assert keys["tokenizer.ggml.tokens"][n + 3] == f"[PAD{n + 3}]"
    assert len(keys["tokenizer.ggml.merges"]) == n - 256
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        assert ours.encode(text, add_special=False) == theirs.encode(text, disallowed_special=()), text
    text = "x <|im_end|> y<|tool|>"
    assert ours.encode(text, add_special=False, parse_special=True) == theirs.encode(text, allowed_special="all")
    broken = b"a\xff\xfe b".decode("utf-8", "surrogateescape")
    assert b"".join(ours.piece(i) for i in ours.encode(broken, add_special=False)) == b"a\xff\xfe b"


def test_tiktoken_of_an_unknown_model_type(tmp_path, ranks):
    (tmp_path / "tiktoken.model").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    keys, notes = read(tmp_path, len(ranks), model_type="nobody")
    assert keys["tokenizer.ggml.pre"] == "default"
    assert "does not say how words of model_type 'nobody' are cut" in notes[0]


@pytest.mark.parametrize("line", [b"YQ== x", b"YQ==", b"Y! 5", b"YQ== 0\nYQ== 1", b" 7"])
def test_damaged_tiktoken_files(tmp_path, line):
    (tmp_path / "tiktoken.model").write_bytes(b"eHg= 100\n" + line + b"\n")
    with pytest.raises(FormatError, match=r"tiktoken.model: line \d is no token with its rank"):
        read(tmp_path, 200)
    (tmp_path / "tiktoken.model").write_bytes(b"eHg= 100\nYQ== 100\n")
    with pytest.raises(FormatError, match="several tokens have the same rank"):
        read(tmp_path, 200)


@pytest.fixture
def write_bpe(tmp_path):
    """write_bpe(pre-tokenizer): writes vocab.json and merges.txt of a small byte-level BPE; returns the number of tokens."""

    def build(pre):
        trained = Tokenizer(models.BPE())
        splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[pre].splits]
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        trained.pre_tokenizer = pre_tokenizers.Sequence([*splits, to_bytes])
        options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "special_tokens": ["<|endoftext|>"]}
        trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, show_progress=False, **options))
        model = json.loads(trained.to_str())["model"]
        (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"], ensure_ascii=False))
        lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
        (tmp_path / "merges.txt").write_text("\n".join(lines) + "\n")
        return len(model["vocab"])

    return build


@pytest.mark.parametrize(
    ("name", "model_type", "pre"),
    [("GPT2Tokenizer", "granite", "gpt-2"), ("Qwen2Tokenizer", "anything", "qwen2"), ("Qwen2TokenizerFast", "qwen2", "qwen2")],
)
def test_vocab_and_merges_against_transformers(tmp_path, write_bpe, name, model_type, pre):
    transformers = pytest.importorskip("transformers")
    n = write_bpe(pre)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<|im_start|>": n, "<tool>": n + 1, "<|im_end|>": n + 2}))
    (tmp_path / "special_tokens_map.json").write_text('{"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}')
    settings = {"tokenizer_class": name, "eos_token": "<|im_end|>", "chat_template": "{{ x }}<|im_end|>"}
    keys, notes = read(tmp_path, n + 5, settings, model_type=model_type)
    assert [note for note in notes if "normalizer NFC" not in note] == []
    assert bool(notes) == (pre == "qwen2")
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", pre)
    end = keys["tokenizer.ggml.tokens"].index("<|endoftext|>")
    assert keys["tokenizer.ggml.unknown_token_id"] == end
    assert keys.get("tokenizer.ggml.bos_token_id") == (end if pre == "gpt-2" else None)
    assert (keys["tokenizer.ggml.eos_token_id"], keys["tokenizer.ggml.eot_token_id"]) == (n + 2, n + 2)
    assert not keys["tokenizer.ggml.add_bos_token"]
    types = keys["tokenizer.ggml.token_type"]
    assert types[[end, n, n + 1, n + 2, n + 3]].tolist() == [CONTROL, CONTROL, USER_DEFINED, CONTROL, UNUSED]
    theirs = getattr(transformers, name.removesuffix("Fast")).from_pretrained(tmp_path)
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        if pre == "qwen2":
            text = unicodedata.normalize("NFC", text)
        assert ours.encode(text, add_special=False) == theirs.encode(text, add_special_tokens=False), text
        assert ours.decode(ours.encode(text)) == text
    text = "<|im_start|>user\nthe <tool> fox<|im_end|>\n<|endoftext|>"
    assert ours.encode(text, add_special=False, parse_special=True) == theirs.encode(text, add_special_tokens=False)
    broken = b"a\xff\xfe b".decode("utf-8", "surrogateescape")
    assert b"".join(ours.piece(i) for i in ours.encode(broken, add_special=False)) == b"a\xff\xfe b"


def test_vocab_and_merges_against_tokenizers(tmp_path, write_bpe):
    """The pre-tokenizer follows from model_type if the class is GPT-2's; for an unknown one it is GPT-2's, with a note."""
    n = write_bpe("starcoder")
    keys, notes = read(tmp_path, n, {"tokenizer_class": "GPT2Tokenizer"}, model_type="starcoder2")
    assert notes == []
    theirs = Tokenizer(models.BPE.from_file(str(tmp_path / "vocab.json"), str(tmp_path / "merges.txt")))
    digits = pre_tokenizers.Digits(individual_digits=True)
    theirs.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        assert ours.encode(text, add_special=False) == theirs.encode(text).ids, text
    keys, notes = read(tmp_path, n, {"add_prefix_space": True}, model_type="nobody")
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert "does not say how words of model_type 'nobody' are cut" in notes[0]
    assert "a space before a text" in notes[1]


def test_precedence_of_added_tokens(tmp_path, write_bpe):
    """tokenizer_config.json takes precedence over added_tokens.json; a merge may start with # like the version line."""
    n = write_bpe("gpt-2")
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<a>": n, "<b>": n + 1, "<far>": n + 90}))
    settings = {"added_tokens_decoder": {str(n): {"content": "<a>", "special": True}}, "bos_token": {"content": "<b>"}}
    with (tmp_path / "merges.txt").open("a") as file:
        file.write("# #\r\n#version x\n")
    keys, notes = read(tmp_path, n + 2, {"tokenizer_class": "GPT2Tokenizer", **settings})
    assert keys["tokenizer.ggml.token_type"][-2:].tolist() == [CONTROL, CONTROL]
    assert keys["tokenizer.ggml.bos_token_id"] == n + 1
    assert keys["tokenizer.ggml.merges"][-2:] == ["# #", "#version x"]
    assert notes == [f"1 tokens of the tokenizer have ids beyond the {n + 2} of the model and are left out"]


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("merges.txt", b"#version: 0.2\na b c\n", "line 2 is not a pair of tokens: 'a b c'"),
        ("merges.txt", b"#version: 0.2\na b\n\nab\n", "line 4 is not a pair"),
        ("merges.txt", b"a \n", "line 1 is not a pair"),
        ("merges.txt", b"\xff \xfe\n", "not UTF-8 text"),
        ("vocab.json", b"[]", "not a JSON object|not an object"),
        ("vocab.json", b'{"a": "1"}', "not a list of tokens with their ids"),
        ("vocab.json", b'{"a": true}', "not a list of tokens with their ids"),
        ("vocab.json", b'{"a": 1, "b": 1}', "several tokens have the same id"),
        ("added_tokens.json", b'{"a": 1.5}', "not a list of tokens with their ids"),
    ],
)
def test_damaged_vocab_and_merges(tmp_path, write_bpe, file, content, message):
    n = write_bpe("gpt-2")
    (tmp_path / file).write_bytes(content)
    with pytest.raises(FormatError, match=f"{file}: .*(?:{message})"):
        read(tmp_path, n)


def test_vocab_json_without_merges(tmp_path, write_bpe):
    write_bpe("gpt-2")
    (tmp_path / "merges.txt").unlink()
    assert read(tmp_path, 600)[0] == {"tokenizer.ggml.model": "no_vocab"}


BROKEN = (
    b"\xff\xfe",
    b"ab\xffa c\xfe",
    b"\xc3",
    "é".encode() + b"\x80 ",
    b"\xed\xa0\x80 x",
    "\U000f0000é".encode() + b"\xff",
)


def with_replacements(raw):
    """Each byte that is not UTF-8 as U+FFFD, as a tokenizer without byte tokens reads it."""
    return re.sub("[\udc80-\udcff]", "\ufffd", raw.decode("utf-8", "surrogateescape"))


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


def test_end_of_turn_token(tmp_path, ranks):
    n = len(ranks)
    (tmp_path / "tiktoken.model").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    settings = {"added_tokens_decoder": {str(n): {"content": "<|eot_id|>", "special": True}}}
    assert read(tmp_path, n + 1, settings, model_type="llama", eos_token_id=[5, n])[0]["tokenizer.ggml.eot_token_id"] == n
    assert "tokenizer.ggml.eot_token_id" not in read(tmp_path, n + 1, settings, model_type="llama", eos_token_id=5)[0]
