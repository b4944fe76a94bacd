"""Pipes and devices in the place of files are refused: opening one blocks, or reading it never ends."""

import os
import re
import subprocess
import sys
import threading
import time

import pytest

from ggufmill.errors import FormatError
from ggufmill.formats import file_range
from ggufmill.formats.file_range import MAX_FILE, read_file, read_text
from ggufmill.imatrix.texts import _Reader
from ggufmill.pipeline.common.arguments import read_template

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
_READ = """
import sys
from pathlib import Path
from ggufmill.convert.architectures.encoders.pooling import _list_of_objects
from ggufmill.convert.config import read_json
from ggufmill.convert.model_card import card_metadata
from ggufmill.convert.tokenizers.byte_level_bpe import read_merges
from ggufmill.convert.tokenizers.vocabulary import chat_templates
from ggufmill.convert.tokenizers.sentencepiece import read_model
from ggufmill.convert.tokenizers.tiktoken import is_ranks_file, read_ranks
from ggufmill.convert.tokenizers.wordpiece import read_words
from ggufmill.errors import FormatError
from ggufmill.formats import open_gguf
from ggufmill.formats.hashes import read_manifest
from ggufmill.formats.safetensors import open_safetensors, read_safetensors
from ggufmill.imatrix import load
from ggufmill.imatrix.texts import _Reader
from ggufmill.pipeline.common.checksums import read_checksums
from ggufmill.pipeline.judging.results import read_results
from ggufmill.pipeline.measuring.perplexity import read_result
from ggufmill.quantize.recipes.recipe import load_recipe
from ggufmill.quantize.recipes.variants import _rules_of

READERS = {
    "config.json": read_json,
    "a.safetensors": read_safetensors,
    "a.gguf": open_gguf,
    "a.safetensors.index.json": lambda path: open_safetensors(path.parent),
    "modules.json": _list_of_objects,
    "README.md": lambda path: card_metadata(path.parent, []),
    "merges.txt": lambda path: read_merges(path.parent),
    "chat_template.jinja": lambda path: chat_templates(path.parent, {}, []),
    "tokenizer.model": read_model,
    "ranks.model": is_ranks_file,
    "tiktoken.model": read_ranks,
    "vocab.txt": read_words,
    "SHA256SUMS": read_manifest,
    "a.imatrix": load,
    "result.json": read_result,
    "results.json": read_results,
    "sums": read_checksums,
    "a.parquet": lambda path: list(_Reader(None, None, None).documents(path)),
    "rules.txt": lambda path: _rules_of(path.name, path),
    "recipe.txt": load_recipe,
    "recipe.toml": load_recipe,
}
for name, read in READERS.items():
    try:
        read(Path(sys.argv[1]) / name)
        print(name, "was read")
    except FormatError as error:
        print(error)
"""


def make(path, kind):
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")


@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_is_no_regular_file_is_refused(tmp_path, kind):
    names = re.findall(r'^    "(.*?)":', _READ, re.MULTILINE)
    for name in names:
        make(tmp_path / name, kind)
    done = subprocess.run([sys.executable, "-c", _READ, tmp_path], capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line for line in lines if "not a regular file" not in line] == []
    assert len(lines) == len(names)


def test_a_text_may_come_through_a_pipe(tmp_path):
    """`-f <(zcat text.gz)`."""
    os.mkfifo(tmp_path / "text")
    writer = threading.Thread(target=(tmp_path / "text").write_bytes, args=(b"one\r\ntwo",))
    writer.start()
    assert read_text(tmp_path / "text", pipes=True) == "one\ntwo"
    writer.join()


def test_a_pipe_into_which_nothing_writes_is_not_waited_for(tmp_path, mill, monkeypatch):
    monkeypatch.setattr(file_range, "PIPE_SECONDS", 0.1)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FormatError, match="nothing writes into this pipe"):
        read_text(tmp_path / "pipe", pipes=True)
    for words in ((*_GENERATE, "--grammar-file"), ("perplexity", "no-such-model.gguf", "-f")):
        code, _, err = mill(*words, tmp_path / "pipe")
        assert code in (1, 2)
        assert "nothing writes into this pipe" in err


def test_a_writer_that_takes_its_time_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(file_range, "PIPE_SECONDS", 0.0)
    os.mkfifo(tmp_path / "pipe")
    pipe = os.open(tmp_path / "pipe", os.O_RDWR)  # a writer is there before anybody reads

    def write():
        for part in (b"one ", b"two"):
            time.sleep(0.3)
            os.write(pipe, part)
        os.close(pipe)

    writer = threading.Thread(target=write)
    writer.start()
    assert read_text(tmp_path / "pipe", pipes=True) == "one two"
    writer.join()


_GENERATE = ("generate", "no-such-model.gguf", "-p", "x")


@pytest.mark.parametrize("option", ["--grammar-file", "--json-schema-file"])
def test_a_grammar_may_come_through_a_pipe_but_not_from_a_device(mill, tmp_path, option):
    """A device is refused before anything else is looked at; a text of a pipe is read, and the model is what is missing."""
    make(tmp_path / "device", "device")
    code, _, err = mill(*_GENERATE, option, tmp_path / "device")
    assert (code, len(err.splitlines())) == (2, 1)
    assert "not a regular file" in err
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"{}",))
    writer.start()
    code, _, err = mill(*_GENERATE, option, tmp_path / "pipe")
    writer.join()
    assert code == 2
    assert "no-such-model.gguf" in err


def test_a_chat_template_may_come_through_a_pipe_but_not_from_a_device(tmp_path):
    make(tmp_path / "device", "device")
    with pytest.raises(FormatError, match="not a regular file"):
        read_template(tmp_path / "device")
    os.mkfifo(tmp_path / "pipe")
    writer = threading.Thread(target=(tmp_path / "pipe").write_bytes, args=(b"{{ messages }}",))
    writer.start()
    assert read_template(tmp_path / "pipe") == "{{ messages }}"
    writer.join()
    assert read_template("chatml") == "chatml"
    assert read_template(tmp_path) == str(tmp_path)


def test_a_file_that_is_too_large_is_not_read(tmp_path):
    with (tmp_path / "vocab.txt").open("wb") as file:
        file.truncate(MAX_FILE + 1)
    with pytest.raises(FormatError, match="bytes are too many for such a file"):
        read_file(tmp_path / "vocab.txt")


def test_a_text_from_a_device_is_refused(tmp_path):
    make(tmp_path / "text.jsonl", "device")
    with pytest.raises(FormatError, match="not a regular file"):
        list(_Reader(None, None, None).documents(tmp_path / "text.jsonl"))
    with pytest.raises(FormatError, match="not a regular file"):
        read_file(tmp_path / "text.jsonl", pipes=True)
