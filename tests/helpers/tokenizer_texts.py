"""Texts to train small tokenizers on, texts on which tokenizers differ, and reading a folder of tokenizer files."""

import json
import re

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from ggufmill.convert.config import Config
from ggufmill.convert.tokenizers.byte_level_bpe import CHARACTERS
from ggufmill.convert.tokenizers.vocabulary import read_vocabulary

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


def merged_tokens():
    """Bytes of the tokens of a small byte-level BPE that are longer than a byte, in the order of their merges."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trained.train_from_iterator(CORPUS, trainers.BpeTrainer(vocab_size=600, initial_alphabet=alphabet, show_progress=False))
    byte_of = {character: b for b, character in enumerate(CHARACTERS)}
    merged_texts = [pair[0] + pair[1] for pair in json.loads(trained.to_str())["model"]["merges"]]
    return [bytes(byte_of[c] for c in text) for text in merged_texts]


def read(folder, vocab_size, settings=None, **config):
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return read_vocabulary(folder, Config(folder / "config.json", config), vocab_size)


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
