"""A vocabulary that is written as files is read from them again, of every kind that a GGUF has."""

import numpy as np
import pytest
from tokenizer_texts import NASTY

from ggufmill.convert.config import Config
from ggufmill.convert.export.tokenizer_files import tokenizer_files
from ggufmill.convert.tokenizers.vocabulary import read_vocabulary

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)
PIECES = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL), ("<0x0A>", BYTE), ("\u2581", NORMAL), ("a", NORMAL)]
PIECES += [("\u2581a", NORMAL), ("  ", USER_DEFINED), ("<|im_end|>", CONTROL), ("[PAD9]", UNUSED)]
WORDS = [("[PAD]", CONTROL), ("[UNK]", CONTROL), ("[CLS]", CONTROL), ("[SEP]", CONTROL), ("\u2581the", NORMAL), ("s", NORMAL)]
BYTES = [
    ("a", NORMAL),
    ("b", NORMAL),
    ("ab", NORMAL),
    ("\u0120", NORMAL),
    ("<s>", CONTROL),
    ("</s>", CONTROL),
    ("<x>", USER_DEFINED),
]


def keys(model, pieces, **more):
    values = {"model": model, "pre": "default", "tokens": [text for text, _ in pieces]}
    values["token_type"] = np.array([kind for _, kind in pieces], np.int32)
    return {f"tokenizer.ggml.{key}": value for key, value in (values | more).items()}


SPECIAL = {"bos_token_id": np.uint32(1), "eos_token_id": np.uint32(2), "unknown_token_id": np.uint32(0)}
ADDED = {"add_bos_token": True, "add_eos_token": False}
SCORES = np.array([0, 0, 0, 0, -1.5, -2, -0.25, -3, 0, -4], np.float32)
CASES = {
    "llama": keys("llama", PIECES, scores=SCORES, add_space_prefix=True, eot_token_id=np.uint32(8), **SPECIAL, **ADDED)
    | {"tokenizer.chat_template": "{{ x }}<|im_end|>"},
    "llama-no-prefix": keys("llama", PIECES[:7], scores=SCORES[:7], add_space_prefix=False, **SPECIAL, **ADDED),
    "t5": keys(
        "t5",
        PIECES[:7],
        scores=SCORES[:7],
        add_space_prefix=True,
        remove_extra_whitespaces=True,
        precompiled_charsmap=np.arange(9, dtype=np.uint8),
        **SPECIAL,
        add_bos_token=False,
        add_eos_token=True,
    ),
    "bert": keys(
        "bert",
        WORDS,
        **{f"{name}_token_id": np.uint32(id) for name, id in {"padding": 0, "unknown": 1, "cls": 2, "seperator": 3}.items()},
        add_bos_token=True,
        add_sep_token=True,
    ),
    "gpt2": keys(
        "gpt2",
        BYTES,
        pre="llama-bpe",
        merges=["a b"],
        bos_token_id=np.uint32(4),
        eos_token_id=np.uint32(5),
        **ADDED,
    ),
}


def read(metadata, folder):
    files, _ = tokenizer_files(metadata)
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return read_vocabulary(folder, Config(folder / "config.json", {}), len(metadata["tokenizer.ggml.tokens"]))[0]


@pytest.mark.parametrize("case", CASES)
def test_a_vocabulary_comes_back(tmp_path, case):
    metadata, found = CASES[case], read(CASES[case], tmp_path)
    assert {key: str(value) for key, value in found.items()} == {key: str(value) for key, value in metadata.items()}


@pytest.mark.oracle
def test_transformers_cuts_texts_as_before(tmp_path):
    transformers = pytest.importorskip("transformers")
    from ggufmill.convert import open_source
    from ggufmill.recipes import FOLDER

    for name, data in tokenizer_files(open_source(FOLDER / "demo").metadata)[0].items():
        (tmp_path / name).write_bytes(data)
    old, new = (transformers.PreTrainedTokenizerFast.from_pretrained(folder) for folder in (FOLDER / "demo", tmp_path))
    for text in NASTY:
        assert new(text)["input_ids"] == old(text)["input_ids"]


def test_a_file_without_a_vocabulary_has_no_tokenizer():
    assert tokenizer_files({"tokenizer.ggml.model": "no_vocab"}) == ({}, {})
