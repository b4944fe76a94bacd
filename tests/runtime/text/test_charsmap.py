"""Character maps that are damaged are refused, and no text then makes the library panic."""

import io
import random

import numpy as np
import pytest

from ggufmill.formats import FormatError
from ggufmill.runtime.text.charsmap import check_charsmap
from ggufmill.runtime.text.tokenizer import Tokenizer

TEXTS = ["Once upon", "Größe ﬁ ① ﾊﾟ Ⅷ ㌔", "x́ ẛ̣ 가각", "".join(map(chr, range(1, 600)))]


def double_array(mapping):
    """The array of a few one-byte texts: text -> place among the results. A block of 256 units for each node."""
    units = np.zeros(256 * (2 + len(mapping)), "<u4")
    units[0] = 256 << 10  # the root's children are in block 1
    for i, (text, place) in enumerate(mapping.items()):
        child, block = 256 ^ ord(text), 256 * (2 + i)
        units[child] = (child ^ block) << 10 | 1 << 8 | ord(text)
        units[block] = 1 << 31 | place
    return units


def charsmap(units, texts):
    data = units.tobytes()
    return np.frombuffer(len(data).to_bytes(4, "little") + data + texts, np.uint8)


def vocabulary(map):
    tokens = ["<pad>", "</s>", "<unk>", "▁", "a", "b", "▁a", "é", "bb"]
    return {
        "tokenizer.ggml.model": "t5",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.float32([0, 0, 0, -1, -2, -2, -1, -1, -1]),
        "tokenizer.ggml.token_type": np.int32([3, 3, 2, 1, 1, 1, 1, 1, 1]),
        "tokenizer.ggml.unknown_token_id": 2,
        "tokenizer.ggml.eos_token_id": 1,
        "tokenizer.ggml.precompiled_charsmap": map,
    }


SOUND = charsmap(double_array({"A": 0, "B": 2, "E": 5}), "a\0bb\0é\0".encode())


def test_a_sound_map_is_followed():
    check_charsmap(SOUND)
    assert Tokenizer(vocabulary(SOUND)).encode("ABE", add_special=False) == [6, 8, 7]


def with_units(change):
    units = double_array({"A": 0, "B": 2})
    change(units)
    return charsmap(units, b"a\0bb\0")


DAMAGED = {
    "size beyond the data": np.full(400, 0xFF, np.uint8),
    "size of a part of a unit": np.frombuffer(b"\x05\0\0\0" + bytes(40), np.uint8),
    "no array": np.zeros(4, np.uint8),
    "three bytes": np.zeros(3, np.uint8),
    "root that leads outside": np.frombuffer(bytes([0, 1, 0, 0, *[7] * 300]), np.uint8),
    "child that leads outside": with_units(lambda units: units.__setitem__(256 ^ ord("A"), 1 << 30 | 1 << 8 | ord("A"))),
    "value beyond the texts": with_units(lambda units: units.__setitem__(512, 1 << 31 | 77)),
    "value within a character": charsmap(double_array({"A": 1}), "é\0".encode()),
    "texts that are not UTF-8": charsmap(double_array({"A": 0}), b"\xff\0"),
    "more than any map has": np.zeros((4 << 20) + 1, np.uint8),
}


@pytest.mark.parametrize("map", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_map_is_refused(map):
    with pytest.raises(FormatError, match="precompiled_charsmap"):
        Tokenizer(vocabulary(map))


def test_no_map_that_is_accepted_makes_the_library_panic(capfd):
    """One or two bytes changed, of a small map and of SentencePiece's own."""
    draw = random.Random(1)
    accepted = 0
    for sound, times in ((SOUND, 1500), (sentencepiece_map(), 40)):
        for _ in range(times if sound is not None else 0):
            data = sound.copy()
            for _ in range(draw.randrange(1, 3)):
                data[draw.randrange(len(data))] = draw.choice((0, 1, 7, 0x80, 0xFF, draw.randrange(256)))
            try:
                tokenizer = Tokenizer(vocabulary(data))
            except FormatError:
                continue
            accepted += 1
            for text in TEXTS:
                tokenizer.encode(text)
    assert accepted > 100
    assert "panicked" not in capfd.readouterr().err


def sentencepiece_map():
    try:
        import sentencepiece
    except ImportError:
        return None
    file = io.BytesIO()
    options = {"vocab_size": 60, "hard_vocab_limit": False, "num_threads": 1, "minloglevel": 2}
    lines = iter(["the quick brown fox jumps over the lazy dog"] * 20)
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=lines, model_writer=file, model_type="unigram", **options)
    normalizer = file.getvalue()
    # NormalizerSpec (field 3 of the model) with precompiled_charsmap (field 2)
    at = normalizer.index(b"nmt_nfkc\x12") + 9
    size = shift = 0
    while True:
        byte = normalizer[at]
        size, shift, at = size | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return np.frombuffer(normalizer, np.uint8, size, at).copy()


def test_a_panic_of_the_library_is_one_line(monkeypatch):
    class PanicException(BaseException):
        """As pyo3 has it."""

    class Panics:
        def encode_batch_fast(self, *arguments, **options):
            raise PanicException("index out of bounds")

    tokenizer = Tokenizer(vocabulary(SOUND))
    tokenizer._backend = Panics()
    with pytest.raises(FormatError, match="cannot write this text: index out of bounds"):
        tokenizer.encode("a")
    Panics.encode_batch_fast = lambda *arguments, **options: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        tokenizer.encode("a")
