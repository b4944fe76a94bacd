"""tokenizer.json -> metadata -> the runtime's tokenizer: token ids must be those of the `tokenizers` library."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from ggufmill.convert.config import Config
from ggufmill.convert.tokenizers.vocabulary import read_vocabulary
from ggufmill.formats import FormatError
from ggufmill.formats.metadata_values import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and 1234567 other things happened in 2024.\n",
    "def encode(text: str) -> list[int]:\n    return [ids[t] for t in cut(text)]  # it's what we'll do\n",
    "Übergrößenträger fährt über die Brücke. Привет, мир! 你好，世界。こんにちは、カタカナ。안녕하세요\n",
    "    if x != y:\r\n\t\treturn None;;; /* don't */ http://example.com/a/b?c=d&e=%20f\n\n\n",
    "mixed123numbers 3.14159 -42 1e-10 0xFF ½ ² ٣٤ हिन्दी ไทย العربية שלום\n",
] * 4
NASTY = [
    "",
    " ",
    "  leading and trailing   ",
    "\n\n \n\t\r\n",
    "Hello, world! It's 2024; we'LL see y'all.",
    "camelCase snake_case SCREAMING iPhone13 x=y+z;;//comment",
    "一龥ࠀ 漢字かなカナ 한국어 混ぜtext123",
    "é e\u0301 ﬁ Ω K \u00a0\u3000\u200b zero\u200dwidth 👩‍👩‍👧 🙂🙂",
    "1 12 123 1234 12345678901234567890 1,000.50",
    "'s 'T 're'VE don't'd",
    "a\0b \x7f \ufffd \U0010ffff",
    "<|special|> and <|special|>glued<tool> [PAD3] <0x41> ▁under",
    *CORPUS[:5],
]
DEEPSEEK_SPLITS = (
    r"\p{N}{1,3}",
    "[一-龥぀-ゟ゠-ヿ]+",
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+"
    "| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
)
LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
SPECIAL = ["<|begin|>", "<|end|>", "<|special|>"]


def byte_level(splits, ignore_merges=False):
    tokenizer = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    cuts = [pre_tokenizers.Split(Regex(s), "isolated") for s in splits]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [*cuts, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    template = [("<|begin|>", tokenizer.token_to_id("<|begin|>"))]
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=template)
    return tokenizer


def sentencepiece():
    """As Llama 2's tokenizer.json: special tokens, byte tokens, then the trained ones."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", "<s>", "</s>"], show_progress=False)
    # Word by word: SentencePiece makes no merges across words.
    words = [word for text in CORPUS for word in text.replace("\n", "").split(" ")]
    tokenizer.train_from_iterator(words, trainer)
    saved = json.loads(tokenizer.to_str())
    tokens = list(saved["model"]["vocab"])
    order = tokens[:3] + [f"<0x{b:02X}>" for b in range(256)] + tokens[3:]
    saved["model"]["vocab"] = {text: i for i, text in enumerate(order)}
    tokenizer = Tokenizer.from_str(json.dumps(saved))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def saved(folder, tokenizer, **settings):
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer if isinstance(tokenizer, str) else tokenizer.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def read(folder, vocab_size, **config):
    return read_vocabulary(folder, Config(folder / "config.json", config), vocab_size)


@pytest.mark.parametrize(
    ("pre", "splits", "ignore_merges"),
    [("deepseek-v3", DEEPSEEK_SPLITS, False), ("llama-bpe", LLAMA3_SPLIT, True), ("smaug-bpe", LLAMA3_SPLIT, False)],
)
def test_byte_level_round_trip(tmp_path, pre, splits, ignore_merges):
    theirs = byte_level(splits, ignore_merges)
    keys, notes = read(saved(tmp_path, theirs, bos_token="<|begin|>", eos_token="<|end|>"), theirs.get_vocab_size())
    assert notes == []
    assert keys["tokenizer.ggml.pre"] == pre
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text
        assert ours.encode(text, parse_special=True) == theirs.encode(text).ids


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    """With far fewer tokens than the model has rows; some thousand rows without one are usual."""
    theirs = byte_level(DEEPSEEK_SPLITS)
    n = theirs.get_vocab_size()
    folder = saved(tmp_path, theirs)
    keys, notes = read(folder, n + 4096)
    assert len(keys["tokenizer.ggml.tokens"]) == n + 4096
    assert not any("rows have no token" in note for note in notes)
    with pytest.raises(FormatError, match=rf"its tokenizer has {n:,} tokens, .* vocab_size 129,280: put .*--no-vocab"):
        read(folder, 129280)


def test_rows_without_a_token_are_noted(tmp_path, monkeypatch):
    monkeypatch.setattr("ggufmill.convert.tokenizers.vocabulary._USUAL_PADDING", 2)
    theirs = byte_level(DEEPSEEK_SPLITS)
    _, notes = read(saved(tmp_path, theirs), theirs.get_vocab_size() + 3)
    assert any("3 rows have no token; they are never generated" in note for note in notes)


def test_byte_level_metadata(tmp_path):
    theirs = byte_level(DEEPSEEK_SPLITS)
    n = theirs.get_vocab_size()
    end = {"__type": "AddedToken", "content": "<|end|>", "special": True}
    settings = {
        "bos_token": "<|begin|>",
        "eos_token": end,
        "pad_token": "<|end|>",
        "unk_token": None,
        "chat_template": "{{ x }}",
    }
    keys, notes = read(saved(tmp_path, theirs, **settings), n + 3)
    tokens, types = keys.pop("tokenizer.ggml.tokens"), keys.pop("tokenizer.ggml.token_type")
    merges = keys.pop("tokenizer.ggml.merges")
    assert keys == {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.bos_token_id": np.uint32(0),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.padding_token_id": np.uint32(1),
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.ggml.add_eos_token": False,
        "tokenizer.chat_template": "{{ x }}",
    }
    assert type(keys["tokenizer.ggml.bos_token_id"]) is np.uint32
    assert tokens[:3] == SPECIAL
    assert tokens[n - 1 :] == ["<tool>", f"[PAD{n}]", f"[PAD{n + 1}]", f"[PAD{n + 2}]"]
    assert types.dtype == np.int32
    assert types[:4].tolist() == [CONTROL, CONTROL, CONTROL, NORMAL]
    assert types[n - 1 :].tolist() == [USER_DEFINED, UNUSED, UNUSED, UNUSED]
    assert len(merges) == n - 256 - 4
    assert all(len(m.split(" ")) == 2 for m in merges)
    assert notes == []


def test_merges_as_pairs_and_as_text(tmp_path):
    tokenizer = json.loads(byte_level(DEEPSEEK_SPLITS).to_str())
    pairs = tokenizer["model"]["merges"]
    assert isinstance(pairs[0], list)  # what this version of the library writes
    as_pairs = read(saved(tmp_path, json.dumps(tokenizer)), 600)[0]["tokenizer.ggml.merges"]
    tokenizer["model"]["merges"] = [" ".join(p) for p in pairs]
    assert read(saved(tmp_path, json.dumps(tokenizer)), 600)[0]["tokenizer.ggml.merges"] == as_pairs
    tokenizer["model"]["merges"] = [["a b", "c"]]
    assert read(saved(tmp_path, json.dumps(tokenizer)), 600)[0]["tokenizer.ggml.merges"] == ["aĠb c"]


def test_sentencepiece_round_trip(tmp_path):
    theirs = sentencepiece()
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
    keys, notes = read(saved(tmp_path, theirs, **settings), theirs.get_vocab_size())
    assert notes == []
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        expected = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text, add_special=False, parse_special=True) == expected, text
    assert ours.encode("The fox") == theirs.encode("The fox").ids


def test_sentencepiece_metadata(tmp_path):
    theirs = sentencepiece()
    n = theirs.get_vocab_size()
    keys, _ = read(saved(tmp_path, theirs, bos_token="<s>", eos_token="</s>", unk_token="<unk>"), n + 1)
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("llama", "default")
    assert keys["tokenizer.ggml.add_space_prefix"] is True
    assert keys["tokenizer.ggml.add_bos_token"] is True  # from the template
    assert keys["tokenizer.ggml.unknown_token_id"] == 0
    assert "tokenizer.ggml.merges" not in keys
    types, scores = keys["tokenizer.ggml.token_type"], keys["tokenizer.ggml.scores"]
    assert types[:3].tolist() == [UNKNOWN, CONTROL, CONTROL]
    assert (types[3:259] == BYTE).all()
    assert types[-1] == UNUSED
    assert scores.dtype == np.float32
    merges = [a + b for a, b in json.loads(theirs.to_str())["model"]["merges"]]
    ranked = [scores[theirs.token_to_id(text)] for text in merges]
    assert ranked == [-i for i in range(len(merges))]
    single = [scores[i] for i in range(259, n) if len(keys["tokenizer.ggml.tokens"][i]) == 1]
    assert max(single) < min(ranked)


@pytest.mark.parametrize(
    ("pre_tokenizer", "prefix"),
    [
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}, True),
        ({"type": "Metaspace", "replacement": "▁", "prepend_scheme": "never", "split": False}, False),
        ({"type": "Metaspace", "replacement": "▁", "add_prefix_space": False}, False),
    ],
)
def test_space_prefix_of_a_metaspace(tmp_path, pre_tokenizer, prefix):
    tokenizer = json.loads(sentencepiece().to_str()) | {"normalizer": None, "pre_tokenizer": pre_tokenizer}
    keys, notes = read(saved(tmp_path, json.dumps(tokenizer)), 900)
    assert keys["tokenizer.ggml.model"] == "llama"
    assert keys["tokenizer.ggml.add_space_prefix"] is prefix
    assert notes == []


def test_tokens_that_look_special(tmp_path):
    theirs = byte_level(DEEPSEEK_SPLITS)
    theirs.add_tokens([AddedToken("<｜User｜>", normalized=False), AddedToken("▁word", normalized=False)])
    keys, _ = read(saved(tmp_path, theirs), theirs.get_vocab_size())
    assert keys["tokenizer.ggml.token_type"][-2:].tolist() == [CONTROL, USER_DEFINED]
    assert keys["tokenizer.ggml.tokens"][-2:] == ["<｜User｜>", "▁word"]


def test_special_ids_from_config(tmp_path):
    theirs = byte_level(DEEPSEEK_SPLITS)
    folder = saved(tmp_path, theirs, eos_token="<|nowhere|>", pad_token="<|absent|>")
    keys, notes = read(folder, theirs.get_vocab_size(), bos_token_id=0, eos_token_id=[2, 1], unk_token_id=99999)
    assert keys["tokenizer.ggml.bos_token_id"] == 0
    assert keys["tokenizer.ggml.eos_token_id"] == 2
    assert "tokenizer.ggml.padding_token_id" not in keys
    assert sum("is none of the" in note for note in notes) == 2
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"pad_token": {"content": "<|special|>"}}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False, "add_eos_token": True}))
    keys, _ = read(folder, theirs.get_vocab_size(), bos_token_id=0)
    assert keys["tokenizer.ggml.padding_token_id"] == 2
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (False, True)


def test_more_tokens_than_the_model_has(tmp_path):
    theirs = byte_level(DEEPSEEK_SPLITS)
    n = theirs.get_vocab_size()
    keys, notes = read(saved(tmp_path, theirs), n - 1)
    assert len(keys["tokenizer.ggml.tokens"]) == n - 1
    assert notes == [f"1 tokens of tokenizer.json have ids beyond the {n - 1} of the model and are left out"]


def test_unsupported_steps_are_noted(tmp_path):
    tokenizer = json.loads(byte_level((r"\p{L}{1,5}",)).to_str())
    tokenizer["normalizer"] = {"type": "Sequence", "normalizers": [{"type": "NFC"}]}
    keys, notes = read(saved(tmp_path, json.dumps(tokenizer)), 600)
    assert keys["tokenizer.ggml.pre"] == "default"
    assert len(notes) == 2
    assert "normalizer NFC" in notes[0]
    assert "pre-tokenizer" in notes[1]


@pytest.mark.parametrize("model_type", ["WordLevel", "BPE"])
def test_unsupported_models_give_no_vocabulary(tmp_path, model_type):
    keys, notes = read(saved(tmp_path, json.dumps({"model": {"type": model_type, "vocab": {}}})), 10)
    assert keys == {"tokenizer.ggml.model": "no_vocab"}
    assert "tokenizer.json is of an unknown kind" in notes[0]
    (tmp_path / "tokenizer.json").unlink()
    keys, notes = read(tmp_path, 10)
    assert keys == {"tokenizer.ggml.model": "no_vocab"}
    assert "no tokenizer.json" in notes[0]


@pytest.mark.parametrize(
    "damage",
    [
        {"model": {"vocab": [1]}},
        {"model": {"merges": ["abc"]}},
        {"model": {"vocab": {"a": "b"}}},
        {"added_tokens": [{"id": 1}]},
        {"added_tokens": [{"id": 1, "content": 5, "special": True}]},
        {"added_tokens": 5},
        {"pre_tokenizer": 5},
        {"pre_tokenizer": [5]},
        {"decoder": 5},
        {"normalizer": "NFC"},
        {"post_processor": [1]},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": 5}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [5]}},
    ],
)
def test_malformed_tokenizers(tmp_path, damage):
    tokenizer = json.loads(byte_level(DEEPSEEK_SPLITS).to_str())
    tokenizer["model"] |= damage.get("model", {})
    tokenizer |= {k: v for k, v in damage.items() if k != "model"}
    with pytest.raises(FormatError, match=r"tokenizer.json: not a tokenizer of the usual form"):
        read(saved(tmp_path, json.dumps(tokenizer)), 600)
    with pytest.raises(FormatError, match=r"tokenizer.json: not JSON"):
        read(saved(tmp_path, "{"), 600)


def test_chat_templates(tmp_path):
    theirs = byte_level(DEEPSEEK_SPLITS)
    named = [{"name": "default", "template": "A"}, {"name": "tool_use", "template": "B"}]
    keys, _ = read(saved(tmp_path, theirs, chat_template=named), 600)
    assert keys["tokenizer.chat_template"] == "A"
    assert keys["tokenizer.chat_templates"] == ["tool_use"]
    assert keys["tokenizer.chat_template.tool_use"] == "B"
    (tmp_path / "chat_template.jinja").write_text("C")
    assert read(tmp_path, 600)[0]["tokenizer.chat_template"] == "C"


GOOD = {"name": "tool_use", "template": "B"}


@pytest.mark.parametrize(
    ("setting", "expected", "problem"),
    [
        (5, {}, "chat_template of tokenizer_config.json is neither a text nor a list of named ones"),
        ({"default": "A"}, {}, "is neither a text nor a list"),
        ([GOOD, 5], {"tool_use": "B"}, "chat template 5 is not a name with a text"),
        ([{"name": ["a"], "template": "A"}, GOOD], {"tool_use": "B"}, "['a']"),
        ([{"name": "default", "template": 5}, GOOD], {"tool_use": "B"}, "is not a name with a text"),
        ([{"name": "a"}, GOOD], {"tool_use": "B"}, "is not a name with a text"),
        ([{"name": "a" * 2000, "template": "A"}, GOOD], {"tool_use": "B"}, "is not a name with a text"),
    ],
)
def test_malformed_chat_templates_are_left_out(tmp_path, setting, expected, problem):
    theirs = byte_level(DEEPSEEK_SPLITS)
    keys, notes = read(saved(tmp_path, theirs, chat_template=setting), theirs.get_vocab_size())
    assert {k: v for k, v in keys.items() if k.startswith("tokenizer.chat_template.")} == {
        f"tokenizer.chat_template.{name}": text for name, text in expected.items()
    }
    assert keys.get("tokenizer.chat_templates", []) == list(expected)
    assert "tokenizer.chat_template" not in keys
    assert len(notes) == 1
    assert problem in notes[0]
    assert "left out" in notes[0]
    assert len(notes[0]) < 300


def test_chat_template_file_that_is_not_utf8(tmp_path):
    theirs = byte_level(DEEPSEEK_SPLITS)
    folder = saved(tmp_path, theirs, chat_template="A")
    (folder / "chat_template.jinja").write_bytes(b"{{ \xff\xfe }}")
    keys, notes = read(folder, theirs.get_vocab_size())
    assert keys["tokenizer.chat_template"] == "A"  # from tokenizer_config.json
    assert len(notes) == 1
    assert "chat_template.jinja is not UTF-8 text and is left out" in notes[0]


def test_lone_surrogate_in_the_vocabulary(tmp_path):
    tokenizer = json.loads(byte_level(DEEPSEEK_SPLITS).to_str())
    tokenizer["model"]["vocab"]["a\udcffb"] = 600
    with pytest.raises(FormatError, match=r"tokenizer.json: not Unicode text: half a character at the end of .*a.udcff"):
        read(saved(tmp_path, json.dumps(tokenizer)), 601)


def test_published_story_model():
    """SentencePiece-like, but trained without pre-tokenization, so that merges cross words."""
    folder = Path(os.environ.get("GGUFMILL_SHARED", "/nowhere")) / "data" / "story"
    if not folder.exists():
        pytest.skip("GGUFMILL_SHARED has no data/story")
    theirs = Tokenizer.from_file(str(folder / "tokenizer.json"))
    keys, notes = read(folder, 2048, bos_token_id=1)
    assert notes == []
    ours = RuntimeTokenizer(keys)
    letters = set("".join(t for t in keys["tokenizer.ggml.tokens"] if len(t) == 1)) | {" "}
    text = (folder.parent / "text" / "wiki.test.raw").read_text("utf-8").lower()
    text = "".join(c for c in text[:200_000] if c in letters)
    for start in range(0, len(text) - 400, 400):
        piece = text[start : start + 400]
        assert ours.encode(piece, add_special=False) == theirs.encode(piece, add_special_tokens=False).ids
