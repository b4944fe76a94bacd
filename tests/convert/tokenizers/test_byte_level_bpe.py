"""vocab.json with merges.txt: token ids must be those of the original library."""

import json
import unicodedata

import pytest
from tokenizer_texts import CORPUS, NASTY, read
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

from ggufmill.formats import FormatError
from ggufmill.formats.metadata_values import CONTROL, UNUSED, USER_DEFINED
from ggufmill.formats.pretokenizers import PRE_TOKENIZERS
from ggufmill.runtime.text.tokenizer import Tokenizer as RuntimeTokenizer


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
