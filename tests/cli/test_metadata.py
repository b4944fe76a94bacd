"""`metadata`: keys set, removed and renamed, in place and by writing a new file; interrupted changes."""

import json
import os

import gguf
import numpy as np
import pytest

from ggufmill import PlanError, edit_metadata
from ggufmill.errors import MillError
from ggufmill.formats import TYPES, FormatError, open_gguf
from ggufmill.formats.gguf import open_file
from ggufmill.formats.gguf_header import header_bytes, value_type
from ggufmill.formats.header_edit import type_name
from ggufmill.jobs import header_update
from ggufmill.jobs.lock import output_lock

METADATA = {
    "general.architecture": "llama",
    "general.name": "before",
    "llama.block_count": np.uint32(2),
    "llama.rope.freq_base": np.float32(10000),
    "a.flag": True,
    "a.many": np.arange(40, dtype=np.int32),
    "a.words": ["eins", "zwei"],
    "a.bytes": "bytes \udcff",
}
DATA = np.arange(64, dtype=np.float32).tobytes()


def write(path, metadata=METADATA, alignment=32):
    header, offsets, size = header_bytes(metadata, [("t.one", (8, 4), TYPES["f32"]), ("t.two", (32,), TYPES["f32"])], alignment)
    assert size == offsets[0] + len(DATA)
    path.write_bytes(header + DATA)
    return path


@pytest.fixture
def model(tmp_path):
    return write(tmp_path / "m.gguf")


def tensors(path):
    return b"".join(t.data.tobytes() for t in open_gguf(path).tensors.values())


def test_without_options_it_shows(mill, model):
    before = model.read_bytes()
    code, out, _ = mill("metadata", model)
    assert (code, model.read_bytes()) == (0, before)
    assert "general.name          before" in out
    assert json.loads(mill("metadata", model, "--json")[1])["metadata"]["a.many"]["length"] == 40


def test_in_place_and_anew(mill, model):
    code, out, _ = mill("metadata", model, "--set", "llama.block_count=3", "--set", "general.name=beyond")
    assert (code, "in place" in out) == (0, True)
    changed = METADATA | {"llama.block_count": np.uint32(3), "general.name": "beyond"}
    assert model.read_bytes() == write(model.with_name("expected.gguf"), changed).read_bytes()
    changes = ["--set", "general.name=" + "x" * 100, "--remove", "a.flag"]
    changes += ["--rename", "a.words=a.texts", "--set", "a.new:int32[]=[1, -2]"]
    code, out, _ = mill("metadata", model, *changes, "--json")
    result = json.loads(out)
    assert (code, result["status"], result["nbytes"]) == (0, "rewritten", model.stat().st_size)
    assert {c["key"]: (c["type_before"], c["type_after"]) for c in result["changes"]} == {
        "general.name": ("string", "string"),
        "a.flag": ("bool", None),
        "a.words": ("string[]", None),
        "a.texts": (None, "string[]"),
        "a.new": (None, "int32[]"),
    }
    opened = open_gguf(model)
    kept = [key for key in METADATA if key not in ("a.flag", "a.words", "a.bytes")]
    assert list(opened.metadata) == [*kept, "a.texts", "a.bytes", "a.new"]
    assert opened.metadata["a.new"].tolist() == [1, -2]
    assert opened.metadata["a.bytes"] == METADATA["a.bytes"]
    assert tensors(model) == DATA
    assert not list(model.parent.glob("*.journal")) + list(model.parent.glob("*.part")) + list(model.parent.glob("*.lock"))


def test_the_gguf_package_reads_what_was_changed(model):
    edit_metadata(model, set={"a.new:uint8": 7, "a.bytes": "text", "a.floats": [0.5, 2.0], "a.long": "y" * 500})
    reader = gguf.GGUFReader(model)
    fields = {key: reader.fields[key].contents() for key in ("a.new", "a.floats", "a.long", "llama.rope.freq_base")}
    assert fields == {"a.new": 7, "a.floats": [0.5, 2.0], "a.long": "y" * 500, "llama.rope.freq_base": 10000}
    assert np.array_equal(reader.tensors[1].data, np.arange(32, 64, dtype=np.float32))


def test_every_type_is_kept(model):
    values = {f"x.{dtype}": np.dtype(dtype).type(1) for dtype in ("u1", "i1", "u2", "i2", "u4", "i4", "u8", "i8", "f4", "f8")}
    write(model, METADATA | values)
    edit_metadata(model, set=dict.fromkeys(values, "5"))
    after = open_gguf(model).metadata
    assert {key: after[key] for key in values} == dict.fromkeys(values, 5)
    assert all(value_type(key, after[key]) == value_type(key, value) for key, value in values.items())


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        (["--set", "llama.block_count=-1"], "llama.block_count: '-1' is no value of type uint32"),
        (["--set", "llama.block_count=1.5"], "no value of type uint32"),
        (["--set", "llama.block_count=many"], "no value of type uint32"),
        (["--set", "a.flag=perhaps"], "no value of type bool"),
        (["--set", "a.many=[1, 99999999999]"], "no value of type int32[]"),
        (["--set", "a.many=5"], "no value of type int32[]"),
        (["--set", "a.words=[1]"], "no value of type string[]"),
        (["--set", "a.new=5"], "write a.new:uint32=5 or a.new:string=5"),
        (["--set", "a.new=[1.5]"], "write a.new:float32[]=[1.5]"),
        (["--set", "general.alignment=64"], "general.alignment follows from how the file is laid out"),
        (["--set", "split.count=2"], "split.count follows"),
        (["--remove", "general.nane"], "there is no key general.nane; did you mean general.name?"),
        (["--rename", "general.name=a.flag"], "two keys would be named a.flag"),
        (["--remove", "general.architecture"], "without general.architecture nothing loads the file"),
    ],
)
def test_what_does_not_fit_changes_nothing(mill, model, options, problem):
    before = model.read_bytes()
    code, _, err = mill("metadata", model, *options)
    assert (code, len(err.splitlines())) == (1, 1)
    assert problem in err
    assert model.read_bytes() == before


def test_wrong_usage(mill, model, tmp_path):
    for options in (["--set", "novalue"], ["--set", "=5"], ["--rename", "a"], ["--set-file", f"a={tmp_path}/none"]):
        code, _, err = mill("metadata", model, *options)
        assert (code, len(err.splitlines())) == (2, 1)


def test_out_and_dry_run_leave_the_file(mill, model, tmp_path):
    before = model.read_bytes()
    (tmp_path / "chat.jinja").write_text("{{ messages }}\n")
    change = ["--set-file", f"tokenizer.chat_template={tmp_path / 'chat.jinja'}"]
    code, out, _ = mill("metadata", model, *change, "--dry-run")
    assert (code, "nothing written" in out) == (0, True)
    assert mill("metadata", model, *change, "-o", tmp_path / "o.gguf")[0] == 0
    assert model.read_bytes() == before
    assert open_gguf(tmp_path / "o.gguf").metadata["tokenizer.chat_template"] == "{{ messages }}\n"
    assert tensors(tmp_path / "o.gguf") == DATA
    assert mill("metadata", model, *change, "-o", tmp_path / "o.gguf")[0] == 1  # exists
    assert mill("metadata", model, *change, "-o", model, "--force")[0] == 1  # an input
    assert mill("metadata", model, "-o", tmp_path / "copy.gguf")[0] == 0
    assert (tmp_path / "copy.gguf").read_bytes() == before


def test_a_split_model_changes_in_its_first_shard(mill, model, tmp_path):
    assert mill("split", model, tmp_path / "s", "--split-max-tensors", "1")[0] == 0
    first, second = sorted(tmp_path.glob("s-*.gguf"))
    before = second.read_bytes()
    assert mill("metadata", second, "--set", "general.name=" + "z" * 99)[0] == 0
    assert second.read_bytes() == before
    assert open_gguf(second).metadata["general.name"] == "z" * 99
    assert "split.count" in open_file(first)[0]
    assert tensors(first) == DATA


def test_links_and_unfinished_jobs_are_refused(mill, model, tmp_path):
    change = ["--set", "llama.block_count=5"]
    (tmp_path / "link.gguf").symlink_to(model)
    assert "is a link" in mill("metadata", tmp_path / "link.gguf", *change)[2]
    os.link(model, tmp_path / "hard.gguf")
    assert "a hard link" in mill("metadata", model, *change)[2]
    (tmp_path / "hard.gguf").unlink()
    model.with_name("m.gguf.journal").touch()
    assert "is not finished" in mill("metadata", model, *change)[2]


def test_an_interrupted_change_is_completed(mill, model, monkeypatch):
    """The disk fails in the middle of the header: nothing reads the file until the change is complete."""
    before, write_at = model.read_bytes(), header_update.write_at

    def fail(fd, data, offset):
        if offset:
            raise OSError(5, "Input/output error")
        return write_at(fd, data[:200], offset)

    monkeypatch.setattr(header_update, "write_at", fail)
    with pytest.raises(MillError, match="Input/output error"):
        edit_metadata(model, set={"general.name": "BEFORE", "llama.block_count": 9})
    assert model.read_bytes() != before
    with pytest.raises(FormatError, match="`ggufmill metadata .*` completes it"):
        open_gguf(model)
    monkeypatch.undo()
    code, out, err = mill("metadata", model)
    assert (code, "complete now" in err, "BEFORE" in out) == (0, True, True)
    assert open_gguf(model).metadata["llama.block_count"] == 9
    assert tensors(model) == DATA


def test_the_lock_of_a_change_that_was_killed_at_its_end_is_removed(model):
    with output_lock(model):
        edit_metadata(model)  # of another job, which runs
        assert model.with_name("m.gguf.lock").exists()
    model.with_name("m.gguf.lock").touch()
    assert edit_metadata(model, set={"general.name": "before"}).status == "unchanged"
    assert os.listdir(model.parent) == ["m.gguf"]


def test_a_foreign_record_is_refused(model):
    header_update.header_record(model).write_bytes(b"x" * 100)
    with pytest.raises(PlanError, match="remove the record"):
        edit_metadata(model)


def test_types_are_named_as_users_write_them():
    assert type_name("k", np.array([1], np.int16)) == "int16[]"
    assert type_name("k", ["a"]) == "string[]"
    assert type_name("k", np.float64(1)) == "float64"
