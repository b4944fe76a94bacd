"""tiktoken's files: token ids must be those of the original library."""

import base64

import pytest
from tokenizer_texts import NASTY, merged_tokens, read

from ggufmill.convert.tokenizers.byte_level_bpe import CHARACTERS
from ggufmill.formats import FormatError
from ggufmill.formats.metadata_values import CONTROL, NORMAL, UNUSED
from ggufmill.formats.pretokenizers import PRE_TOKENIZERS
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer
from ggufmill.runtime.text.vocabulary import byte_characters


@pytest.fixture(scope="module")
def ranks():
    """Token -> rank of a small byte-level BPE, as in tiktoken's files."""
    tokens = [*(bytes([b]) for b in range(255, -1, -1)), *merged_tokens()]
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


# From Meta's code beside Llama 4
LLAMA4 = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)


@pytest.mark.parametrize(
    ("file", "model_type", "pre"),
    [
        ("tiktoken.model", "kimi_k2", "kimi-k2"),
        ("qwen.tiktoken", "qwen", "qwen2"),
        ("tokenizer.model", "llama", "llama-bpe"),
        ("tokenizer.model", "llama4", "llama4"),
        ("tokenizer.model", "llama4_text", "llama4"),
    ],
)
def test_tiktoken(tmp_path, ranks, file, model_type, pre):
    tiktoken = pytest.importorskip("tiktoken")
    rule = {"kimi-k2": KIMI, "llama4": LLAMA4}.get(pre) or PRE_TOKENIZERS[pre].splits[0]
    n = len(ranks)
    special = {"[BOS]": n, "[EOS]": n + 1, "<|im_end|>": n + 2, "<|tool|>": n + 4}
    theirs = tiktoken.Encoding("test", pat_str=rule, mergeable_ranks=ranks, special_tokens=special)
    (tmp_path / file).write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    added = {str(id): {"content": text, "special": True} for text, id in special.items()}
    settings = {"added_tokens_decoder": added, "bos_token": "[BOS]", "eos_token": "[EOS]", "chat_template": "{{ x }}<|im_end|>"}
    keys, notes = read(tmp_path, n + 8, settings, model_type=model_type)
    assert ["normalizer NFC has no counterpart" in note for note in notes] == [True] * (file == "qwen.tiktoken")
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


def test_hunyuan(tmp_path, ranks):
    """hy.tiktoken of Hunyuan A13B: the code beside the model has its special tokens, from the id after the last rank."""
    tiktoken = pytest.importorskip("tiktoken")
    (tmp_path / "hy.tiktoken").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    n = len(ranks)
    settings = {"eos_token": "<|eos|>", "pad_token": "<|pad|>"}
    keys, notes = read(tmp_path, n + 210, settings, model_type="hunyuan_v1_moe", bos_token_id=1, eos_token_id=3)
    assert len(notes) == 1
    assert "normalizer NFC has no counterpart" in notes[0]
    assert (keys["tokenizer.ggml.model"], keys["tokenizer.ggml.pre"]) == ("gpt2", "hunyuan")
    tokens = ["<|endoftext|>", "<|startoftext|>", "<|bos|>", "<|eos|>", "<|pad|>", "<|extra_0|>"]
    assert keys["tokenizer.ggml.tokens"][n : n + 6] == tokens
    assert keys["tokenizer.ggml.tokens"][-1] == "<|extra_204|>"
    assert set(keys["tokenizer.ggml.token_type"][n:]) == {CONTROL}
    assert [keys[f"tokenizer.ggml.{name}_token_id"] for name in ("bos", "eos", "padding")] == [n + 2, n + 3, n + 4]
    theirs = tiktoken.Encoding("test", pat_str=PRE_TOKENIZERS["qwen2"].splits[0], mergeable_ranks=ranks, special_tokens={})
    ours = RuntimeTokenizer(keys)
    for text in NASTY:
        assert ours.encode(text, add_special=False) == theirs.encode(text), text
    assert "<|extra_9|>" not in read(tmp_path, n + 10, settings, model_type="hunyuan_v1_dense")[0]["tokenizer.ggml.tokens"]


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


def test_end_of_turn_token(tmp_path, ranks):
    n = len(ranks)
    (tmp_path / "tiktoken.model").write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), r) for t, r in ranks.items()))
    settings = {"added_tokens_decoder": {str(n): {"content": "<|eot_id|>", "special": True}}}
    assert read(tmp_path, n + 1, settings, model_type="llama", eos_token_id=[5, n])[0]["tokenizer.ggml.eot_token_id"] == n
    assert "tokenizer.ggml.eot_token_id" not in read(tmp_path, n + 1, settings, model_type="llama", eos_token_id=5)[0]
