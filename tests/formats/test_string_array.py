"""Arrays of strings: where each begins, against a loop over the lengths; what is decoded; which may be a text."""

import pickle
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggufmill.errors import FormatError
from ggufmill.formats import open_gguf, string_array
from ggufmill.formats.gguf_header import header_bytes, metadata_bytes
from ggufmill.formats.string_array import (
    LENGTH,
    StringArray,
    _zero_runs,
    all_have_inner_space,
    byte_lengths,
    numbers_of,
    string_starts,
)
from ggufmill.formats.types import TYPES

ANY = st.one_of(
    st.binary(max_size=12),
    st.binary(max_size=3).map(lambda text: text + bytes(9)),  # zeros that look like the upper bytes of a length
    st.integers(250, 70_000).map(lambda length: b"a" * length),
    st.text(max_size=9).map(str.encode),
)


def payload_of(texts: list[bytes]) -> bytes:
    return b"".join(struct.pack("<Q", len(text)) + text for text in texts)


def array_of(texts: list[bytes]) -> StringArray:
    payload = payload_of(texts)
    starts, is_whole = string_starts(payload, 0, len(texts))
    assert is_whole
    return StringArray(payload, starts)


@settings(max_examples=200, deadline=None)
@given(st.lists(ANY, max_size=300), st.binary(max_size=20), st.integers(0, 9))
def test_strings_begin_where_the_lengths_say(texts, after, position):
    buffer = bytes(position) + payload_of(texts) + after
    starts, is_whole = string_starts(buffer, position, len(texts))
    expected = np.cumsum([position, *(LENGTH + len(text) for text in texts)])
    assert is_whole
    assert starts.tolist() == expected.tolist()


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY, max_size=50))
def test_made_of_texts(texts):
    """Also of bytes that are not UTF-8, which are surrogates in a text."""
    made, expected = StringArray.of(text.decode("utf-8", "surrogateescape") for text in texts), array_of(texts)
    assert made == expected
    assert made.starts == expected.starts


@settings(max_examples=100, deadline=None)
@given(st.lists(ANY, min_size=1, max_size=50), st.data())
def test_strings_that_are_cut_off_are_counted(texts, data):
    whole = payload_of(texts)
    ends = np.cumsum([LENGTH + len(text) for text in texts])
    size = data.draw(st.integers(0, len(whole) - 1))
    starts, is_whole = string_starts(whole[:size], 0, len(texts))
    assert not is_whole
    assert len(starts) - 1 == np.count_nonzero(ends <= size)


def test_windows_of_a_large_array():
    texts = [b"%d" % number * (40 if number % 5000 == 0 else 1) for number in range(200_000)]
    strings = array_of(texts)
    assert list(strings) == [text.decode() for text in texts]
    assert strings[199_999] == "199999"
    assert strings[-1] == "199999"
    assert strings[5:7] == ["5", "6"]


@given(st.lists(ANY, max_size=60))
@settings(max_examples=50, deadline=None)
def test_items_are_those_of_a_list(texts):
    strings, decoded = array_of(texts), [text.decode("utf-8", "surrogateescape") for text in texts]
    assert list(strings) == decoded
    assert [strings[number] for number in range(len(texts))] == decoded
    assert strings == decoded
    assert decoded == strings
    assert strings == array_of(texts)
    assert strings != [*decoded, ""]
    assert repr(strings) == repr(decoded)
    assert byte_lengths(strings).tolist() == byte_lengths(decoded).tolist() == list(map(len, texts))
    assert pickle.loads(pickle.dumps(strings)) == strings


@given(st.lists(ANY, max_size=60), st.lists(ANY, max_size=5))
@settings(max_examples=100, deadline=None)
def test_numbers_of_texts_have_all_that_are_one_of_them(texts, more):
    strings = array_of(texts)
    decoded = list(strings)
    wanted = {*decoded[::3], *(text.decode("utf-8", "surrogateescape") for text in more)}
    exact = [number for number, text in enumerate(decoded) if text in wanted]
    for found in (numbers_of(strings, wanted), numbers_of(decoded, wanted)):
        assert [number for number in found if decoded[number] in wanted] == exact
        assert list(found) == sorted(set(found))


def test_numbers_of_texts_are_few_and_may_leave_out_a_byte():
    strings = array_of([b"a b", b"ab", b"a", b"axb", b"a cb", b"", b"  x"])
    assert numbers_of(strings, {"ab"}) == [1]
    assert numbers_of(strings, {"ab", " x"}, without=1) == [0, 3, 6]
    assert numbers_of(strings, {""}) == [5]
    assert numbers_of(strings, set()) == []


@pytest.mark.parametrize("text", [b"", b"a" * 300, b"\0" * 9])
def test_strings_whose_lengths_do_not_stand_out_are_read_in_runs(text, monkeypatch):
    """Of such an array a window is looked at once for hundreds of strings: a hostile header must not take minutes."""
    looked, texts = [], [text] * 20_000
    monkeypatch.setattr(string_array, "_zero_runs", lambda content: looked.append(len(content)) or _zero_runs(content))
    assert list(array_of(texts)) == [text.decode()] * len(texts)
    assert len(looked) < len(texts) // 200


@given(st.lists(st.text("a \0é", max_size=4), max_size=20))
def test_spaces_within(texts):
    inner = [text for text in texts if " " in text[1:]]
    for some in (texts, inner, [*inner, ""]):
        assert all_have_inner_space(array_of([text.encode() for text in some])) == all(" " in text[1:] for text in some)


@pytest.mark.parametrize("count", [1, 64, 65, 5000])
def test_metadata_is_written_again_unchanged(tmp_path, count):
    texts = ["é\udcff"[: number % 3] + str(number) for number in range(count)]
    data, _, _ = header_bytes({"a": texts, "b": [texts]}, [("t", (32,), TYPES["f32"])], 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(data + bytes(128))
    metadata = open_gguf(path).metadata
    assert metadata["a"] == texts
    assert list(metadata["a"]) == texts
    assert isinstance(metadata["a"], StringArray if count > 64 else list)
    assert metadata_bytes({"a": metadata["a"]}) == metadata_bytes({"a": texts})
    assert metadata_bytes(metadata) == metadata_bytes({"a": texts, "b": [texts]})


def test_a_header_that_ends_within_an_array_is_refused(tmp_path):
    data, _, _ = header_bytes({"a": ["text"] * 1000}, [], 32)
    path = tmp_path / "m.gguf"
    path.write_bytes(data[:9000])
    with pytest.raises(FormatError, match=r"string \d+ of 1000 reaches beyond the end"):
        open_gguf(path)
