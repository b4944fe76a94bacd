"""tekken.json: token ids must be those of tiktoken with the file's ranks and pattern, special tokens before them."""

import base64
import json

import pytest
from tokenizer_texts import NASTY, merged_tokens, read

from ggufmill.convert.checkpoint import TOKENIZER_FILES
from ggufmill.convert.hub.fetch import _SMALL_FILES
from ggufmill.formats import FormatError
from ggufmill.formats.metadata_values import CONTROL, NORMAL, UNUSED
from ggufmill.formats.pretokenizers import PRE_TOKENIZERS
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer

N_SPECIAL = 24
LISTED = ["<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>", "[THINK]"]
# As published: the letters of upper and lower case, each with marks; digits one by one
PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@pytest.fixture(scope="module")
def tokens():
    """Bytes of the tokens of a small byte-level BPE, in order of rank."""
    return list(dict.fromkeys([*(bytes([b]) for b in range(256)), *merged_tokens()]))


def saved(folder, tokens, special=LISTED, more=0, **config):
    """A folder with tekken.json. more: tokens in the file beyond those of the model."""
    vocab = [{"rank": i, "token_bytes": base64.b64encode(t).decode(), "token_str": None} for i, t in enumerate(tokens)]
    n = len(tokens) - more + N_SPECIAL
    settings = {"pattern": PATTERN, "default_vocab_size": n, "default_num_special_tokens": N_SPECIAL, "version": "v7"} | config
    listed = special and [{"rank": i, "token_str": t, "is_control": True} for i, t in enumerate(special)]
    (folder / "tekken.json").write_text(json.dumps({"config": settings, "vocab": vocab, "special_tokens": listed}))
    return n


@pytest.mark.parametrize("more", [0, 40])
def test_tekken(tmp_path, tokens, more):
    tiktoken = pytest.importorskip("tiktoken")
    n = saved(tmp_path, tokens, more=more)
    ranks = {token: rank for rank, token in enumerate(tokens[: len(tokens) - more])}
    theirs = tiktoken.Encoding("test", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens={})
    keys, notes = read(tmp_path, n + 3)
    assert notes == []
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "tekken")
    assert [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("unknown", "bos", "eos", "padding")] == [0, 1, 2, 5]
    assert (keys["tokenizer.ggml.add_bos_token"], keys["tokenizer.ggml.add_eos_token"]) == (True, False)
    assert keys["tokenizer.ggml.tokens"][6:8] == ["[THINK]", "<SPECIAL_7>"]
    types = keys["tokenizer.ggml.token_type"]
    assert types[[0, N_SPECIAL - 1, N_SPECIAL, n - 1, n]].tolist() == [CONTROL, CONTROL, NORMAL, NORMAL, UNUSED]
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        assert ours.encode(text, add_special=False) == [N_SPECIAL + id for id in theirs.encode(text)], text
    marked = ours.encode("[INST]the[/INST]", parse_special=True)
    assert marked == [1, 3, *(N_SPECIAL + id for id in theirs.encode("the")), 4]


def test_special_tokens_that_an_older_file_does_not_list(tmp_path, tokens):
    n = saved(tmp_path, tokens, special=None)
    keys, notes = read(tmp_path, n)
    assert notes == []
    assert keys["tokenizer.ggml.tokens"][8:21] == [
        *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]"),
        *("[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]", "<SPECIAL_20>"),
    ]
    assert keys["tokenizer.ggml.padding_token_id"] == 11


def test_another_pattern_is_noted(tmp_path, tokens):
    n = saved(tmp_path, tokens, pattern=PRE_TOKENIZERS["gpt-2"].splits[0])
    keys, notes = read(tmp_path, n)
    assert keys["tokenizer.ggml.pre"] == "gpt-2"
    assert notes == ["the pre-tokenizer is that of gpt-2 but for ignore_merges True: token ids may differ"]
    n = saved(tmp_path, tokens, pattern="(")
    assert "the pre-tokenizer of tekken.json cannot be built" in read(tmp_path, n)[1][0]


def test_tokenizer_json_comes_first(tmp_path, tokens):
    n = saved(tmp_path, tokens)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(FormatError, match=r"tokenizer.json: not JSON"):
        read(tmp_path, n)


@pytest.mark.parametrize(
    "damage",
    [
        {"config": None},
        {"config": {"default_vocab_size": "x"}},
        {"config": {"pattern": "x", "default_vocab_size": 10**30, "default_num_special_tokens": 10**30}},
        {"config": {"pattern": "x", "default_vocab_size": 5, "default_num_special_tokens": 9}},
        {"vocab": 5},
        {"vocab": [5] * 600},
        {"vocab": [{"rank": 0, "token_bytes": "YQ=="}] * 600},
        {"vocab": [{"rank": i, "token_bytes": "YQ=="} for i in range(600)]},
        {"vocab": [{"rank": 0, "token_bytes": "!"}]},
        {"vocab": []},
        {"special_tokens": 5},
        {"special_tokens": [{"rank": -1, "token_str": "a"}]},
        {"special_tokens": [{"rank": 0, "token_str": 5}]},
        {"special_tokens": [{"rank": 0, "token_str": "a"}, {"rank": 1, "token_str": "a"}]},
    ],
)
def test_damaged_files(tmp_path, tokens, damage):
    n = saved(tmp_path, tokens)
    data = json.loads((tmp_path / "tekken.json").read_text()) | damage
    (tmp_path / "tekken.json").write_text(json.dumps(data))
    with pytest.raises(FormatError, match=r"tekken.json: not a vocabulary of the usual form"):
        read(tmp_path, n)


def test_the_file_is_fetched_and_part_of_a_checkpoint():
    assert "tekken.json" in TOKENIZER_FILES
    assert "tekken.json" in _SMALL_FILES
