"""What `inspect` shows of files whose names and values no terminal or JSON reader could take as they are."""

import io
import json
import math
import sys

import numpy as np
import pytest

from ggufmill.cli import main
from ggufmill.cli.display import console
from ggufmill.cli.display.console import emit
from ggufmill.formats import TYPES
from ggufmill.formats.gguf_header import header_bytes

METADATA = {
    "general.architecture": "llama",
    "a.colour": "\x1b[31mred\x1b]0;title\x07",
    "a.broken": "bytes \udcff\udcfe",
    "a.long": "\x1b[2J" * 1000,
    "a.lines": "one\ntwo\rthree",
    "a\x1b[1mkey\udcff": "value",
    "a.words": ["\x1b[31m", "\udcff"],
    "a.nan": np.float32("nan"),
    "a.infinite": np.float64("-inf"),
    "a.floats": np.array([1.0, np.nan, np.inf], np.float32),
    "a.many": np.full(100, np.nan, np.float32),
    "a.nested": [np.array([1, 2], np.int32), np.array([np.nan], np.float32), ["x"]],
    "a.text": "Gr\u00fc\u00dfe, \u4e16\u754c",
}


@pytest.fixture
def nasty(tmp_path):
    header, offsets, size = header_bytes(METADATA, [("t\x1b[31m", (8,), TYPES["f32"])], 32)
    (tmp_path / "a.gguf").write_bytes(header + bytes(size - offsets[0]))
    return tmp_path / "a.gguf"


def shown(monkeypatch, *arguments, encoding="utf-8"):
    """(exit code, text of a stdout that refuses what its encoding cannot say)."""
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding, errors="strict"))
    with pytest.raises(SystemExit) as ended:
        main(["inspect", *map(str, arguments)])
    sys.stdout.flush()
    return ended.value.code, raw.getvalue().decode(encoding)


def test_text_output_has_only_printable_characters(nasty, monkeypatch):
    code, text = shown(monkeypatch, nasty)
    assert code == 0
    assert all(c.isprintable() or c == "\n" for c in text)
    names, values = (r"a\x1b[1mkey\udcff", r"t\x1b[31m"), (r"bytes \udcff\udcfe", r"one\ntwo\rthree")
    for part in (*names, *values, r"\x1b[31mred\x1b]0;title\x07"):
        assert part in text
    assert "Gr\u00fc\u00dfe, \u4e16\u754c" in text
    assert max(map(len, text.splitlines())) < 120


def test_names_in_the_progress_bar_too(nasty, monkeypatch, capsys):
    code, _ = shown(monkeypatch, nasty, "--checksums", "--check")
    assert code == 0
    assert "\x1b[31m" not in capsys.readouterr().err


def test_a_terminal_without_unicode(nasty, monkeypatch):
    code, text = shown(monkeypatch, nasty, encoding="ascii")
    assert code == 0
    assert r"Gr\xfc\xdfe, \u4e16\u754c" in text


def strict(text):
    def refuse(name):
        raise ValueError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)


def test_json_without_nan(nasty, monkeypatch):
    code, text = shown(monkeypatch, nasty, "--json", encoding="ascii")
    result = strict(text)
    assert code == 0
    metadata = result["metadata"]
    assert (metadata["a.nan"], metadata["a.infinite"], metadata["a.floats"]) == (None, None, [1.0, None, None])
    assert metadata["a.many"] == {"length": 100, "first": [None] * 8}
    assert metadata["a.nested"] == [[1, 2], [None], ["x"]]
    assert metadata["a.broken"] == METADATA["a.broken"]
    assert metadata["a.colour"] == METADATA["a.colour"]


def test_emit_replaces_nan_and_infinity_at_any_depth(capsys):
    value = {"a": math.inf, "b": [1.5, -math.inf, {"c": math.nan}], "d": (math.nan, 1), "e": None}
    emit(lambda: value, True, str)
    assert strict(capsys.readouterr().out) == {"a": None, "b": [1.5, None, {"c": None}], "d": [None, 1], "e": None}


@pytest.mark.parametrize(("stored", "number"), [("q1_0_g128", 41), ("q2_0", 41), ("q1_0_g128", 40)])
def test_a_file_type_of_two_meanings_is_explained(tmp_path, monkeypatch, stored, number):
    metadata = {"general.architecture": "llama", "general.file_type": np.uint32(number)}
    header, offsets, size = header_bytes(metadata, [("a.weight", (256, 2), TYPES[stored])], 32)
    (tmp_path / "a.gguf").write_bytes(header + bytes(size - offsets[0]))
    _, text = shown(monkeypatch, tmp_path / "a.gguf")
    note = f"note: general.file_type 41 is Q2_0 in llama.cpp, Q1_0_G128 in ik_llama.cpp; most bytes of this file are {stored}"
    assert (note in text) == (number == 41)


def test_whether_another_program_loads_it(tmp_path, capsys):
    def inspected(name, *arguments):
        metadata = {"general.architecture": "gpt-oss", "gpt-oss.block_count": np.uint32(1)}
        header, offsets, size = header_bytes(metadata, [(name, (8,), TYPES["f32"])], 32)
        (tmp_path / "a.gguf").write_bytes(header + bytes(size - offsets[0]))
        with pytest.raises(SystemExit) as ended:
            main(["inspect", str(tmp_path / "a.gguf"), "--json", *arguments])
        captured = capsys.readouterr()
        return ended.value.code or 0, json.loads(captured.out)["problems"], captured.err

    assert inspected("output.weight")[:2] == (0, [])
    code, problems, said = inspected("output.weight", "--for", "llama.cpp")
    assert (code, problems) == (1, ["it needs the key attention.sliding_window"])
    assert "llama.cpp does not load" in said
    code, problems, _ = inspected("token_embd.weight", "--for", "IK_llama.cpp")
    assert (code, len(problems)) == (1, 2)


def test_a_checkpoint_is_shown_as_it_is_stored(mill, tiny_llama, write_checkpoint, tmp_path):
    config, tensors = tiny_llama(hidden_size=64, intermediate_size=128)
    folder = write_checkpoint(tmp_path / "model", config | {"rope_scaling": {"rope_type": "default"}}, tensors, shards=2)
    code, out, _ = mill("inspect", folder, "--json")
    shown = json.loads(out)
    assert code == 0
    assert (shown["gguf_architecture"], shown["problem"]) == ("llama", "")
    assert shown["config"]["hidden_size"] == 64
    assert shown["config"]["rope_scaling.rope_type"] == "default"
    assert {t["name"]: t["shape"] for t in shown["tensors"]} == {name: list(array.shape) for name, array in tensors.items()}
    assert {t["file"] for t in shown["tensors"]} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert shown["parameters"] == sum(array.size for array in tensors.values())
    assert shown["total_bytes"] == sum(array.nbytes for array in tensors.values())
    assert "converts to llama" in mill("inspect", folder)[1]


def test_a_checkpoint_that_does_not_convert_is_shown_too(mill, tiny_llama, write_checkpoint, tmp_path):
    config, tensors = tiny_llama()
    folder = write_checkpoint(tmp_path / "model", config | {"architectures": ["NobodyKnowsForCausalLM"]}, tensors)
    code, out, _ = mill("inspect", folder)
    assert code == 0
    assert "does not convert: " in out
    assert "NobodyKnowsForCausalLM" in out
    assert mill("inspect", folder, "--check")[0] == 2
    (tmp_path / "empty").mkdir()
    code, _, err = mill("inspect", tmp_path / "empty")
    assert (code, "has no config.json" in err) == (1, True)


def test_a_table_counts_the_rows_beyond_its_limit(monkeypatch):
    monkeypatch.setattr(console, "MOST_ROWS", 2)
    lines = console.table(("name", "bytes"), ["a", "bb", "ccc"], lambda name: (name, len(name))).splitlines()
    assert lines == ["name  bytes", "----  -----", "a         1", "bb        2", "and 1 more, which --json has"]


def test_what_is_not_printed_is_not_made(capsys):
    emit(pytest.fail, False, lambda: "a text")
    assert capsys.readouterr().out == "a text\n"
