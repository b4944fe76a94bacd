"""split, merge, hash, --keep-split, --partial-requant, --metadata and inspect --json, as a user calls them."""

import hashlib
import json

import numpy as np
import pytest
import xxhash

from ggufmill.formats import open_gguf


@pytest.fixture
def model(mill, tiny_llama, write_checkpoint, tmp_path):
    config, tensors = tiny_llama(hidden_size=64, intermediate_size=128)
    folder = write_checkpoint(tmp_path / "model", config, tensors)
    assert mill("convert", folder, tmp_path / "m.gguf")[0] == 0
    return tmp_path / "m.gguf"


def shards(tmp_path, stem):
    return sorted(tmp_path.glob(f"{stem}-*.gguf"))


@pytest.mark.parametrize("options", [(), ("--split-max-tensors", 5), ("--split-max-size", "60K", "--no-tensor-first-split")])
def test_split_and_merge(mill, model, tmp_path, options):
    code, out, _ = mill("split", model, tmp_path / "s", *options, "--json")
    assert code == 0
    parts = shards(tmp_path, "s")
    assert [f["path"] for f in json.loads(out)["files"]] == [str(p) for p in parts]
    opened, whole = open_gguf(parts[-1]), open_gguf(model)
    assert len(parts) > 2 or (not options and [p.name for p in parts] == ["s-00001-of-00001.gguf"])  # fewer than 128 tensors
    assert list(opened.tensors) == list(whole.tensors)
    assert all(np.array_equal(t.data, whole.tensors[n].data) for n, t in opened.tensors.items())
    assert all(p.stat().st_size <= 60_000 for p in parts) or "--split-max-size" not in options
    assert mill("merge", parts[-1], tmp_path / "back.gguf")[0] == 0
    assert (tmp_path / "back.gguf").read_bytes() == model.read_bytes()
    if not options:
        return
    parts[1].unlink()
    code, _, err = mill("merge", parts[0], tmp_path / "again.gguf")
    assert (code, "1 of" in err and "shards are missing" in err) == (1, True)
    assert not (tmp_path / "again.gguf").exists()


def test_merge_of_one_file_is_refused(mill, model, tmp_path):
    code, _, err = mill("merge", model, tmp_path / "o.gguf")
    assert code == 1
    assert "is one file already" in err


def test_hash(mill, model, tmp_path, monkeypatch):
    code, out, _ = mill("hash", model, "--all", "-o", tmp_path / "manifest")
    assert code == 0
    assert out == (tmp_path / "manifest").read_text()
    lines = [line.split() for line in out.splitlines()]
    tensors = open_gguf(model).tensors
    payload = b"".join(t.data.tobytes() for t in tensors.values())
    assert len(lines) == 3 * (len(tensors) + 1)
    digests = {(algorithm, name): digest for algorithm, digest, name in lines}
    assert digests["xxh64", str(model)] == xxhash.xxh64(payload).hexdigest()
    assert digests["sha256", str(model)] == hashlib.sha256(payload).hexdigest()
    one = tensors["blk.0.attn_q.weight"].data.tobytes()
    assert digests["sha256", f"{model}:blk.0.attn_q.weight"] == hashlib.sha256(one).hexdigest()
    assert digests["xxh64", f"{model}:blk.0.attn_q.weight"] == xxhash.xxh64(one).hexdigest()
    monkeypatch.chdir(tmp_path)
    code, out, _ = mill("hash", model.name, "--check", "manifest")
    assert code == 0
    assert all(line.startswith("sha256 ") and line.endswith("  -  Ok") for line in out.splitlines())
    assert mill("hash", model.name, "--check", "manifest", "--xxh64")[0] == 0


def test_a_manifest_replaces_nothing(mill, model, tmp_path):
    (tmp_path / "other.gguf").write_bytes(b"a model")
    code, out, err = mill("hash", model, "-o", tmp_path / "other.gguf")
    assert (code, out) == (1, "")
    assert "other.gguf exists; use --force to replace it" in err
    assert (tmp_path / "other.gguf").read_bytes() == b"a model"
    code, out, _ = mill("hash", model, "-o", tmp_path / "other.gguf", "--force")
    assert (code, out) == (0, (tmp_path / "other.gguf").read_text())


def test_hash_finds_changed_tensors(mill, model, tmp_path):
    assert mill("hash", model, "-o", tmp_path / "manifest")[0] == 0
    info = open_gguf(model).tensors["blk.1.ffn_up.weight"]
    with model.open("r+b") as file:
        file.seek(info.offset + 5)
        byte = file.read(1)[0]
        file.seek(info.offset + 5)
        file.write(bytes([byte ^ 1]))
    code, out, err = mill("hash", model, "--check", tmp_path / "manifest", "--json")
    assert code == 1
    assert len(json.loads(out)["bad"]) == 2
    assert "blk.1.ffn_up.weight (xxh64): Mismatch" in err
    (tmp_path / "manifest").write_text("nothing\n")
    assert "no line of this manifest" in mill("hash", model, "--check", tmp_path / "manifest")[2]
    (tmp_path / "manifest").write_text(f"xxh64     {'0' * 16}  {model}:no_such_tensor\n")
    assert mill("hash", model, "--check", tmp_path / "manifest")[0] == 1


def test_hash_of_a_renamed_file(mill, model, tmp_path):
    assert mill("hash", model, "-o", tmp_path / "manifest")[0] == 0
    renamed = model.rename(tmp_path / "renamed.gguf")
    code, out, err = mill("hash", renamed, "--check", tmp_path / "manifest")
    assert code == 0, err
    assert all(line.endswith("Ok") for line in out.splitlines())
    with renamed.open("r+b") as file:
        file.seek(-1, 2)
        file.write(bytes([renamed.read_bytes()[-1] ^ 1]))
    assert mill("hash", renamed, "--check", tmp_path / "manifest")[0] == 1


def test_each_hash_is_counted_once(mill, model, tmp_path):
    """What the manifest alone has, and what the file alone has, are as many hashes more."""
    assert mill("hash", model, "-o", tmp_path / "manifest")[0] == 0
    text = (tmp_path / "manifest").read_text()
    (tmp_path / "manifest").write_text(text.replace(":blk.", ":former."))
    code, _, err = mill("hash", model, "--check", tmp_path / "manifest")
    n = text.count(":blk.")
    assert code == 1
    assert f"{2 * n} of {len(text.splitlines()) + n} hashes are not as" in err


def test_hash_of_shards(mill, model, tmp_path):
    assert mill("split", model, tmp_path / "s", "--split-max-tensors", 8)[0] == 0
    parts = shards(tmp_path, "s")
    code, out, _ = mill("hash", parts[0], "--sha1", "--no-layer")
    assert code == 0
    assert [line.split("  ")[-1] for line in out.splitlines()] == [str(p) for p in parts]


@pytest.mark.slow
def test_keep_split_and_partial_requant(mill, model, tmp_path):
    assert mill("split", model, tmp_path / "s", "--split-max-tensors", 7, "--no-tensor-first-split")[0] == 0
    first = shards(tmp_path, "s")[0]
    arguments = ("quantize", first, tmp_path / "q.gguf", "q8_0", "--pure", "--keep-split")
    assert mill(*arguments)[0] == 0
    parts = shards(tmp_path, "q")
    assert len(parts) == len(shards(tmp_path, "s"))
    before = {p: p.read_bytes() for p in parts}
    old, new = open_gguf(first).tensors, open_gguf(parts[0]).tensors
    assert {n: t.path.name[1:] for n, t in old.items()} == {n: t.path.name[1:] for n, t in new.items()}
    parts[2].unlink()
    stays = parts[1].stat().st_mtime_ns
    assert "exists; use --force" in mill(*arguments)[2]
    planned = json.loads(mill(*arguments, "--partial-requant", "--dry-run", "--json")[1])
    assert planned["disk"]["needed"] == len(before[parts[2]])
    code, _, err = mill(*arguments, "--partial-requant")
    assert code == 0
    assert f"{len(parts) - 1} of {len(parts)} files exist already" in err
    assert {p: p.read_bytes() for p in parts} == before
    assert parts[1].stat().st_mtime_ns == stays
    parts[2].unlink()
    other = [a if a != "q8_0" else "q4_0" for a in arguments]
    assert "is not what this job would write" in mill(*other, "--partial-requant")[2]
    assert mill("repack", parts[0], tmp_path / "r.gguf", "--keep-split")[0] == 1  # a shard is missing
    assert mill(*arguments, "--partial-requant")[0] == 0
    assert mill("repack", parts[0], tmp_path / "r.gguf", "--keep-split")[0] == 0
    assert len(shards(tmp_path, "r")) == len(parts)
    for command in (("quantize", model, tmp_path / "x.gguf", "q8_0"), ("repack", parts[0], tmp_path / "x.gguf", "--undo")):
        assert mill(*command, "--keep-split")[0] == 1


def test_metadata_from_a_file_and_from_the_command_line(mill, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "c", *tiny_llama())
    (tmp_path / "m.json").write_text('{"general.author": "Me", "general.name": "One", "x.y": 3}')
    arguments = ("convert", folder, tmp_path / "c.gguf", "--metadata", tmp_path / "m.json")
    assert mill(*arguments, "--override-kv", "general.name=str:Two")[0] == 0
    metadata = open_gguf(tmp_path / "c.gguf").metadata
    assert (metadata["general.author"], metadata["general.name"], metadata["x.y"]) == ("Me", "Two", 3)
    assert "general.quantized_by" not in metadata


def test_inspect_json_is_complete(mill, model):
    result = json.loads(mill("inspect", model, "--json", "--arrays")[1])
    opened = open_gguf(model)
    assert result["file_bytes"] == model.stat().st_size == sum(result["file_nbytes"])
    assert (result["alignment"], result["gguf_version"], result["architecture"]) == (32, 3, "llama")
    assert result["parameters"] == sum(t["n_elements"] for t in result["tensors"])
    assert sum(t["nbytes"] for t in result["types"].values()) == result["total_bytes"]
    assert result["metadata"].keys() == result["metadata_types"].keys() == opened.metadata.keys()
    assert result["metadata_types"]["llama.block_count"] == "uint32"
    assert result["metadata_types"]["general.name"] == "string"


def test_hash_never_writes_over_the_model(mill, model, tmp_path):
    before = model.read_bytes()
    code, _, err = mill("hash", model, "-o", model)
    assert code == 1
    assert "is an input of this job" in err
    assert model.read_bytes() == before


def test_quiet_jobs_have_no_bar_to_correct(mill, tiny_llama, write_checkpoint, tmp_path):
    folder = write_checkpoint(tmp_path / "m", *tiny_llama(num_hidden_layers=1))
    code, _, err = mill("convert", folder, tmp_path / "m.gguf", "--quiet")
    assert (code, err) == (0, "")
    assert mill("hash", tmp_path / "m.gguf", "--quiet")[0] == 0


@pytest.mark.parametrize("verb", ["convert", "quantize", "repack", "merge"])
@pytest.mark.parametrize("name", ["o-00001-of-00002.gguf", "x.gguf.part", "x.gguf.journal"])
def test_names_of_other_files_are_no_outputs(mill, model, tmp_path, verb, name):
    """Under them nothing would take the file for a whole model."""
    assert mill("quantize", model, tmp_path / "q.gguf", "q8_0")[0] == 0
    assert mill("split", model, tmp_path / "s", "--split-max-tensors", 12)[0] == 0
    source = {"convert": "model", "quantize": "m.gguf", "repack": "q.gguf", "merge": "s-00001-of-00002.gguf"}[verb]
    before = sorted(tmp_path.iterdir())
    for more in ((), ("--dry-run",)):
        words = (tmp_path / source, tmp_path / name, *(("q8_0",) if verb == "quantize" else ()), *more)
        code, _, err = mill(verb, *words)
        assert (code, "choose another output" in err) == (1, True), err
    assert sorted(tmp_path.iterdir()) == before
