import json
import os
import random
import time
from functools import cache
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference

from ggufmill.formats import FormatError, PlanError, open_gguf
from ggufmill.formats.gguf_header import header_bytes
from ggufmill.formats.pretokenizers import PRE_TOKENIZERS
from ggufmill.runtime import Tokenizer
from ggufmill.runtime.text.tokenizer import split_thousands

TEXT = (
    "The quick brown fox didn't jump over 12345 lazy dogs; she'll jump again, 3.14 times!\n\n  Indented\tline\r\n"
    "Größe, naïve café, Привет мир, 中文字符 and 日本語, emoji 🙂👨‍👩‍👧, symbols += ~^|$ \u00a0end   "
)
GOLDEN = ["deepseek-coder", "deepseek-llm", "gpt-2", "llama-spm", "mpt", "phi-3"]


@pytest.mark.parametrize("name", GOLDEN)
def test_published_vocabularies(name):
    """Vocabulary-only GGUFs with texts and the ids that the models' own tokenizers gave."""
    shared = os.environ.get("GGUFMILL_SHARED")
    path = Path(shared or "") / "data" / "vocab" / f"ggml-vocab-{name}.gguf"
    if not shared or not path.exists():
        pytest.skip("GGUFMILL_SHARED does not hold data/vocab")
    tokenizer = Tokenizer(open_gguf(path).metadata)
    texts = path.with_suffix(".gguf.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    expected = [[int(i) for i in line.split()] for line in path.with_suffix(".gguf.out").read_text().split("\n")]
    assert len(texts) == len(expected) > 40
    for text, ids in zip(texts, expected, strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == text


@cache
def golden_sample():
    """The same texts and ids with vocabularies cut down to the tokens that can take part in them."""
    with np.load(Path(__file__).parents[2] / "data" / "golden_vocabularies.npz") as arrays:
        return json.loads(arrays["json"].tobytes())


@pytest.mark.parametrize("name", GOLDEN)
def test_a_sample_of_published_vocabularies(name):
    sample = golden_sample()["vocabularies"][name]
    tokenizer = Tokenizer({f"tokenizer.ggml.{key}": value for key, value in sample["metadata"].items()})
    texts = golden_sample()["texts"]
    assert len(texts) == len(sample["ids"]) > 40
    for text, ids in zip(texts, sample["ids"], strict=True):
        assert tokenizer.encode(text, add_special=False) == ids, text
        assert tokenizer.decode(ids) == text


@pytest.fixture(scope="module")
def trained():
    """A byte-level tokenizer of the reference library with merges, and the same as GGUF metadata."""
    reference = Reference(models.BPE())
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS["deepseek-v3"].splits]
    reference.pre_tokenizer = pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<bos>", "<eos>", "<|user|>", "<|user|>x"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    reference.train_from_iterator([TEXT, TEXT], trainer)
    tokens = [reference.id_to_token(i) for i in range(reference.get_vocab_size())]
    state = json.loads(reference.to_str())
    merges = [m if isinstance(m, str) else " ".join(m) for m in state["model"]["merges"]]
    assert len(merges) > 100
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "deepseek-v3",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": np.array([3] * 4 + [1] * (len(tokens) - 4), np.int32),
        "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": np.uint32(0),
        "tokenizer.ggml.eos_token_id": np.uint32(1),
        "tokenizer.ggml.add_bos_token": True,
    }
    return reference, metadata


def test_byte_level_ids_are_the_reference_librarys(trained):
    reference, metadata = trained
    tokenizer = Tokenizer(metadata)
    expected = reference.encode(TEXT, add_special_tokens=False).ids
    assert len(expected) < len(TEXT.encode()) / 2  # merges took place
    assert tokenizer.encode(TEXT, add_special=False) == expected
    assert tokenizer.encode(TEXT) == [0, *expected]
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT


def test_the_first_short_texts_do_not_wait_for_all_merges(trained, tmp_path):
    """Their tokens are those of the whole vocabulary, of a file, whose strings are decoded when they are needed."""
    reference, metadata = trained
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header_bytes(metadata, [], 32)[0])
    stored = open_gguf(path).metadata
    assert stored["tokenizer.ggml.tokens"] == metadata["tokenizer.ggml.tokens"]
    assert Tokenizer(stored).eog_ids == Tokenizer(metadata).eog_ids
    for start in range(0, 56, 7):
        tokenizer, text = Tokenizer(stored), TEXT[start : start + 4 * start + 2]
        for _ in range(160 // max(20, len(text))):
            assert tokenizer.encode(text, add_special=False) == reference.encode(text, add_special_tokens=False).ids
        assert "_backend" not in vars(tokenizer) or len(text) > 160
        tokenizer.encode(TEXT[:160])
        assert "_backend" in vars(tokenizer)


def test_a_vocabulary_of_a_file_that_contradicts_itself_is_refused_at_once(trained, sentencepiece, tmp_path):
    """As that of a list, though not all of its strings are decoded."""
    path = tmp_path / "vocabulary.gguf"
    merges = [*trained[1]["tokenizer.ggml.merges"], "xy"]
    for metadata, problem in (
        (trained[1] | {"tokenizer.ggml.merges": merges}, "merges is no list of pairs"),
        (sentencepiece | {"tokenizer.ggml.scores": np.zeros(5, np.float32)}, "scores has to hold"),
    ):
        path.write_bytes(header_bytes(metadata, [], 32)[0])
        for given_ in (metadata, open_gguf(path).metadata):
            with pytest.raises(FormatError, match=problem):
                Tokenizer(given_)


def test_short_texts_of_sentencepiece_do_not_wait_for_all_merges(sentencepiece, tmp_path):
    path = tmp_path / "vocabulary.gguf"
    path.write_bytes(header_bytes(sentencepiece, [], 32)[0])
    stored, draw = open_gguf(path).metadata, random.Random(0)
    whole = Tokenizer(sentencepiece)
    assert "_backend" in vars(whole)
    for length in (*range(12), 40, 99):
        text = "".join(draw.choices("abc é🙂<0x41>", k=length))
        tokenizer = Tokenizer(stored)
        assert tokenizer.encode(text) == whole.encode(text)
        assert tokenizer.encode(f"<s>{text}", parse_special=True) == whole.encode(f"<s>{text}", parse_special=True)
        assert "_backend" not in vars(tokenizer) or length > 70


def test_bos_and_eos_are_added_as_the_metadata_says(trained):
    _, metadata = trained
    both = Tokenizer(metadata | {"tokenizer.ggml.add_eos_token": True})
    assert (both.bos, both.eos, both.add_bos, both.add_eos) == (0, 1, True, True)
    assert both.encode("") == [0, 1]
    neither = Tokenizer({k: v for k, v in metadata.items() if "add_bos" not in k})
    assert neither.encode("") == []
    assert Tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe"} | {"tokenizer.ggml.add_bos_token": False}).encode("") == []
    without = {k: v for k, v in metadata.items() if "add_bos" not in k}
    assert Tokenizer(without | {"tokenizer.ggml.pre": "llama-bpe"}).encode("") == [0]  # the default of this pre-tokenizer


def test_control_tokens_are_recognised_only_with_parse_special(trained):
    tokenizer = Tokenizer(trained[1])
    text = "a<|user|>b<|user|>xc<eos>"
    plain = tokenizer.encode(text, add_special=False)
    assert not {1, 2, 3} & set(plain)
    assert tokenizer.decode(plain) == text
    a, b, c = (tokenizer.encode(letter, add_special=False) for letter in "abc")
    parsed = tokenizer.encode(text, add_special=False, parse_special=True)
    assert parsed == [*a, 2, *b, 3, *c, 1]  # the longer token '<|user|>x' has priority over '<|user|>'
    assert tokenizer.decode(parsed) == "abc"
    assert tokenizer.decode(parsed, skip_special=False) == text


def test_user_defined_tokens_are_always_recognised(trained):
    token_types = trained[1]["tokenizer.ggml.token_type"].copy()
    token_types[2] = 4
    tokenizer = Tokenizer(trained[1] | {"tokenizer.ggml.token_type": token_types})
    assert 2 in tokenizer.encode("a<|user|>b")
    assert tokenizer.decode(tokenizer.encode("a<|user|>b")) == "a<|user|>b"


def test_a_stream_returns_whole_characters(trained):
    tokenizer = Tokenizer(trained[1])
    for text in (TEXT, "🙂é"):
        stream = tokenizer.stream()
        pieces = [stream.feed(token) for token in tokenizer.encode(text)]
        assert "�" not in "".join(pieces)
        assert "".join(pieces) + stream.flush() == text
    stream = tokenizer.stream()
    emoji = tokenizer.encode("🙂", add_special=False)
    assert "".join(stream.feed(token) for token in emoji[:-1]) == ""
    assert stream.flush() == "�"


def test_ignore_merges_takes_whole_words_from_the_vocabulary():
    characters = [chr(c) for c in range(33, 127)]
    tokens = [*characters, "ab", "abc"]
    metadata = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": ["a b"]}
    by_merging = Tokenizer(metadata | {"tokenizer.ggml.pre": "gpt-2"}).encode("abc")
    assert by_merging == [tokens.index("ab"), tokens.index("c")]
    whole = Tokenizer(metadata | {"tokenizer.ggml.pre": "llama-bpe", "tokenizer.ggml.add_bos_token": False}).encode("abc")
    assert whole == [tokens.index("abc")]


@pytest.fixture
def sentencepiece():
    """A small vocabulary with scores and all byte tokens."""
    pieces = ["▁", "a", "b", "c", "ab", "bc", "▁a", "▁ab", "▁▁", "abc"]
    scores = [-20, -21, -22, -23, -5, -4, -6, -3, -2, -9]
    tokens = ["<unk>", "<s>", "</s>", *[f"<0x{b:02X}>" for b in range(256)], *pieces]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": np.array([0.0] * 259 + scores, np.float32),
        "tokenizer.ggml.token_type": np.array([2, 3, 3] + [6] * 256 + [1] * len(pieces), np.int32),
    }


def test_sentencepiece_merges_the_best_score_first(sentencepiece):
    tokenizer = Tokenizer(sentencepiece)

    def pieces(text):
        return [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode(text, add_special=False)]

    assert pieces("abc") == ["▁a", "bc"]  # b c (-4) is merged before a b (-5); then no pair is a token
    assert pieces("ab") == ["▁ab"]
    assert pieces("  ab") == ["▁▁", "▁ab"]
    assert pieces("aé") == ["▁a", "<0xC3>", "<0xA9>"]
    assert pieces("") == []
    assert tokenizer.encode("a") == [1, *tokenizer.encode("a", add_special=False)]  # BOS is the default of this model
    for text in ("abc", "  ab ", "aé🙂\n", " leading"):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_special_tokens_of_phi3_take_the_white_space_after_them(sentencepiece):
    """As `rstrip` of its tokenizer.json, which no GGUF says: by the model's name, as in llama.cpp."""
    sentencepiece["tokenizer.ggml.tokens"] = [*sentencepiece["tokenizer.ggml.tokens"], "<|user|>", "<|end|>"]
    sentencepiece["tokenizer.ggml.scores"] = np.append(sentencepiece["tokenizer.ggml.scores"], np.float32([0, 0]))
    sentencepiece["tokenizer.ggml.token_type"] = np.append(sentencepiece["tokenizer.ggml.token_type"], np.int32([3, 4]))

    def pieces(text, **metadata):
        tokenizer = Tokenizer(sentencepiece | metadata)
        return [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode(text, add_special=False, parse_special=True)]

    text = "<|user|>\n ab<|end|>\t<s> a"
    for name in ("Phi-3-mini-4k-instruct", "phi3"):
        assert pieces(text, **{"general.name": name}) == ["<|user|>", "▁ab", "<|end|>", "<s>", "▁▁", "a"]
    for name in ("Llama", "Phi-4"):
        kept = pieces(text, **{"general.name": name})
        assert kept == ["<|user|>", "▁", "<0x0A>", "▁ab", "<|end|>", "▁", "<0x09>", "<s>", "▁▁", "a"]


def test_sentencepiece_without_a_leading_space(sentencepiece):
    tokenizer = Tokenizer(sentencepiece | {"tokenizer.ggml.add_space_prefix": False})
    assert [tokenizer.vocabulary.tokens[i] for i in tokenizer.encode("ab", add_special=False)] == ["ab"]
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


def best_pair_first(vocabulary, text):
    """SentencePiece's definition, step by step: join the neighbours whose joint token scores best, the first of equals."""
    scores, parts = dict(zip(vocabulary["tokens"], vocabulary["scores"], strict=True)), list(text)
    while True:
        joint = [(-scores[a + b], i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in scores]
        if not joint:
            return parts
        i = min(joint)[1]
        parts[i : i + 2] = [parts[i] + parts[i + 1]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.text("abc", min_size=2, max_size=4), unique=True, max_size=20), st.text("abc", max_size=30), st.randoms())
def test_sentencepiece_follows_its_definition(pieces, text, random):
    tokens = ["a", "b", "c", *pieces]
    vocabulary = {"tokens": tokens, "scores": [-99.0] * 3 + [-float(x) for x in random.sample(range(50), len(pieces))]}
    tokenizer = Tokenizer(
        {
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.add_space_prefix": False,
            **{f"tokenizer.ggml.{key}": value for key, value in vocabulary.items()},
        }
    )
    assert [tokens[i] for i in tokenizer.encode(text, add_special=False)] == best_pair_first(vocabulary, text)


def test_end_ends_only_a_channel_if_there_are_channel_tokens(trained):
    metadata = trained[1]
    tokens = list(metadata["tokenizer.ggml.tokens"])
    tokens[2:4] = ["<|end|>", "<|return|>"]
    assert Tokenizer(metadata | {"tokenizer.ggml.tokens": tokens}).eog_ids == {1, 2, 3}
    tokens[0] = "<|call|>"
    assert Tokenizer(metadata | {"tokenizer.ggml.tokens": tokens}).eog_ids == {0, 1, 3}


def test_eog_ids_from_metadata_and_texts(trained):
    metadata = trained[1]
    assert Tokenizer(metadata).eog_ids == {1}
    tokens = [*metadata["tokenizer.ggml.tokens"][:2], "<|eot_id|>", *metadata["tokenizer.ggml.tokens"][3:]]
    changed = metadata | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.eom_token_id": np.uint32(3)}
    assert Tokenizer(changed).eog_ids == {1, 2, 3}


def test_unsupported_and_contradictory_vocabularies_are_refused(trained):
    metadata = trained[1]
    with pytest.raises(PlanError, match="has no vocabulary"):
        Tokenizer({"general.architecture": "llama"})
    with pytest.raises(PlanError, match="kind 'rwkv' is not supported"):
        Tokenizer(metadata | {"tokenizer.ggml.model": "rwkv"})
    with pytest.raises(PlanError, match="pre-tokenizer 'unheard-of' is not supported"):
        Tokenizer(metadata | {"tokenizer.ggml.pre": "unheard-of"})
    with pytest.raises(FormatError, match="2 values .* for"):
        Tokenizer(metadata | {"tokenizer.ggml.token_type": np.array([1, 1])})


def test_invalid_and_duplicate_tokens_do_not_change_the_encoding(trained):
    """A vocabulary with a token that is not valid UTF-8, as a GGUF reader returns it, and with two tokens of the same text."""
    tokens = [*trained[1]["tokenizer.ggml.tokens"], "\udcff\udcfe", "a"]
    token_types = np.append(trained[1]["tokenizer.ggml.token_type"], [4, 1])
    tokenizer = Tokenizer(trained[1] | {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": token_types})
    assert tokenizer.encode(TEXT) == Tokenizer(trained[1]).encode(TEXT)
    assert tokenizer.piece(len(tokens) - 2) == b"\xff\xfe"


def test_merges_of_what_is_no_token_do_not_change_the_encoding(trained):
    merges = ["\udcff a", "ab \u2603", *trained[1]["tokenizer.ggml.merges"]]
    assert Tokenizer(trained[1] | {"tokenizer.ggml.merges": merges}).encode(TEXT) == Tokenizer(trained[1]).encode(TEXT)


@pytest.mark.parametrize("name", sorted(PRE_TOKENIZERS))
def test_every_pre_tokenizer_splits_without_loss(name):
    splits = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in PRE_TOKENIZERS[name].splits]
    pieces = [piece for piece, _ in pre_tokenizers.Sequence(splits).pre_tokenize_str(TEXT)]
    assert "".join(pieces) == TEXT
    assert len(pieces) > 20


def test_bytes_that_are_not_utf8(trained, sentencepiece):
    """Surrogates from U+DC80 on stand for bytes that are not valid UTF-8; other lone surrogates become U+FFFD."""
    for metadata in (trained[1], sentencepiece):
        tokenizer = Tokenizer(metadata)
        for raw in (b"\xff\xfe", b"ab\xffa c\xfe", b"\xc3", "é".encode() + b"\x80 "):
            ids = tokenizer.encode(raw.decode("utf-8", "surrogateescape"), add_special=False)
            assert b"".join(map(tokenizer.piece, ids)).removeprefix(b" ") == raw
        ids = tokenizer.encode("a\udcffb", add_special=False)
        assert ids[0] == tokenizer.encode("a", add_special=False)[0]
        assert len(ids) == 3
        assert tokenizer.encode("a\ud83db") == tokenizer.encode("a\ufffdb")
        assert tokenizer.decode(tokenizer.encode("a\udcffb")) == "a\ufffdb"


def test_bytes_that_are_not_utf8_without_byte_tokens():
    characters = [chr(c) for c in range(33, 127)]
    tokenizer = Tokenizer({"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": characters, "tokenizer.ggml.pre": "gpt-2"})
    a, b = characters.index("a"), characters.index("b")
    assert tokenizer.encode("a\udcffb") == tokenizer.encode("a\ufffdb") == [a, b]  # U+FFFD is not a token here either


def test_numbers_in_thousands_are_split_as_by_the_expression():
    """`split_thousands` does what the first expression of such a pre-tokenizer does, in linear time."""
    rule = PRE_TOKENIZERS["tiny_aya"]
    assert rule.thousands
    steps = [pre_tokenizers.Split(Regex(expression), "isolated") for expression in rule.splits]
    whole = pre_tokenizers.Sequence(steps)
    rng = np.random.default_rng(1)
    parts = ["a", " ", "_", "²", "é", "\u0301", ".", "½", "中", "-", "\n", "'s", "٣٤٥٦", "1", "12", "123", "4567890", "1" * 100]
    for _ in range(500):
        text = "".join(rng.choice(parts, rng.integers(1, 9)))
        expected = [word for word, _ in whole.pre_tokenize_str(text)]
        assert [word for part in split_thousands(text) for word, _ in steps[1].pre_tokenize_str(part)] == expected, text
    n_parts = len(split_thousands("1" * 3_000_001 + "."))  # the expression takes hours
    assert n_parts == 1_000_002


def split_one_token_after_the_other(tokenizer, text, parse_special):
    """What special tokens are in a text by the definition: each is searched in what those before it have left."""
    fragments = [text]
    for special, token, always in tokenizer.vocabulary.special_tokens:
        if not (always or parse_special):
            continue
        split = []
        for fragment in fragments:
            if isinstance(fragment, int):
                split.append(fragment)
                continue
            first, *others = fragment.split(special)
            strip = token in tokenizer.vocabulary.strips_after
            split += [first, *(item for part in others for item in (token, part.lstrip(" \t\n\v\f\r") if strip else part))]
        fragments = split
    return fragments


@pytest.mark.parametrize("name", ["Phi-3", "other"])
def test_special_tokens_that_overlap(sentencepiece, name):
    specials = ["<a>", "a><", "><a", "<a><a>", "aa", "aaa", "aaaa", "> ", "<"]
    types = [3, 4, 3, 3, 4, 4, 3, 4, 3]
    sentencepiece["tokenizer.ggml.tokens"] = [*sentencepiece["tokenizer.ggml.tokens"], *specials]
    sentencepiece["tokenizer.ggml.scores"] = np.append(sentencepiece["tokenizer.ggml.scores"], np.zeros(9, np.float32))
    sentencepiece["tokenizer.ggml.token_type"] = np.append(sentencepiece["tokenizer.ggml.token_type"], np.int32(types))
    tokenizer = Tokenizer(sentencepiece | {"general.name": name})
    draw = random.Random(1)
    for _ in range(3000):
        text = "".join(draw.choices("<a> \nb", k=draw.randrange(30)))
        for parse in (False, True):
            expected = [each for each in split_one_token_after_the_other(tokenizer, text, parse) if each != ""]
            assert [each for each in tokenizer._split_special(text, parse) if each != ""] == expected, text


def test_many_special_tokens_are_found_in_linear_time(sentencepiece):
    """Searching each of 300 in all that was found before took more than 5 s."""
    specials = [f"<|{i}|>" for i in range(300)]
    sentencepiece["tokenizer.ggml.tokens"] = [*sentencepiece["tokenizer.ggml.tokens"], *specials]
    sentencepiece["tokenizer.ggml.scores"] = np.append(sentencepiece["tokenizer.ggml.scores"], np.zeros(300, np.float32))
    types = np.append(sentencepiece["tokenizer.ggml.token_type"], np.full(300, 3, np.int32))
    tokenizer = Tokenizer(sentencepiece | {"tokenizer.ggml.token_type": types})
    before = time.process_time()
    found = tokenizer._split_special("".join(specials) * 800, True)
    assert len([each for each in found if isinstance(each, int)]) == 300 * 800
    assert time.process_time() - before < 5
