"""hf:OWNER/NAME with a hub on this machine: downloads, remote reading, hashes, failures."""

import json

import hub_server
import numpy as np
import pytest
from commands import exit_code
from hub_server import COMMIT, REPO, serving

from ggufmill.convert import open_source
from ggufmill.convert.hub import fetch
from ggufmill.convert.hub.delete_shards import ShardDeleter
from ggufmill.convert.hub.fetch import parse_repository
from ggufmill.formats import FormatError, MillError, PlanError, open_gguf
from ggufmill.quantize.planning import plan_quantize

TOKEN = "hf_this_is_a_secret"


@pytest.fixture
def hub(write_checkpoint, tiny_llama, tmp_path, monkeypatch):
    constants = pytest.importorskip("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True, raising=False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("GGUFMILL_CACHE", str(tmp_path / "own"))
    write_checkpoint(tmp_path / "repo", *tiny_llama(), 2)
    (tmp_path / "repo" / "README.md").write_text("---\nlicense: mit\n---\n# Tiny\n")
    (tmp_path / "repo" / "pytorch_model.bin").write_bytes(b"not needed")
    (tmp_path / "repo" / "onnx").mkdir()
    (tmp_path / "repo" / "onnx" / "model.safetensors").write_bytes(b"not needed either")
    with serving(tmp_path / "repo") as served:
        monkeypatch.setenv("HF_ENDPOINT", served.endpoint)
        yield served


def names(hub):
    return {name for name, *_ in hub.requests}


def test_download_remote_and_local_give_the_same_tensors(hub, tmp_path, capfd):
    out = {kind: tmp_path / f"{kind}.gguf" for kind in ("local", "download", "remote")}
    assert exit_code("convert", hub.folder, out["local"]) == 0
    assert exit_code("convert", f"hf:{REPO}", out["remote"], "--remote") == 0
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert exit_code("convert", f"hf:{REPO}@{COMMIT}", out["download"]) == 0
    assert len(list((tmp_path / "cache").rglob("model-*.safetensors"))) == 2
    assert not {"pytorch_model.bin", "onnx/model.safetensors"} & names(hub)
    files = {kind: open_gguf(path) for kind, path in out.items()}
    for file in files.values():
        assert file.tensors.keys() == files["local"].tensors.keys()
        assert all(np.array_equal(t.data, files["local"].tensors[n].data) for n, t in file.tensors.items())
    assert files["remote"].metadata["general.name"] == "tiny"
    assert files["remote"].metadata["general.license"] == "mit"
    assert TOKEN not in "".join(capfd.readouterr())


def test_shards_in_the_cache_can_be_deleted_after_use(hub, tmp_path):
    assert exit_code("convert", f"hf:{REPO}", tmp_path / "kept.gguf") == 0
    assert exit_code("convert", f"hf:{REPO}", tmp_path / "out.gguf", "--delete-source-shards") == 0
    assert not list((tmp_path / "cache").rglob("*.safetensors*.released"))
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size > 10_000]
    assert (tmp_path / "out.gguf").read_bytes() == (tmp_path / "kept.gguf").read_bytes()
    again = exit_code("convert", f"hf:{REPO}", tmp_path / "out.gguf", "--delete-source-shards", "--resume")
    assert again == 0  # and no shard is fetched
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file() and p.stat().st_size > 10_000]
    source = open_source(f"hf:{REPO}", remote=True)
    plan = plan_quantize(source, tmp_path / "x.gguf")
    with pytest.raises(PlanError, match="only the shards of a checkpoint folder"):
        ShardDeleter(source, plan)


def test_dry_run_reads_headers_only(hub, tmp_path, capsys):
    assert exit_code("quantize", f"hf:{REPO}", tmp_path / "o.gguf", "bf16", "--dry-run") == 0
    requests = [r for r in hub.requests if r[0].endswith(".safetensors")]
    assert requests
    assert all(r[1].startswith("bytes=0-") for r in requests)
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
    assert "tensors" in capsys.readouterr().out


def test_a_remote_job_resumes(hub, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("ggufmill.convert.hub.remote_shards.CHUNK_BYTES", 4096)
    uninterrupted, out = tmp_path / "uninterrupted.gguf", tmp_path / "out.gguf"
    arguments = ("convert", f"hf:{REPO}", out, "--remote", "-t", 1)
    assert exit_code("convert", f"hf:{REPO}", uninterrupted, "--remote") == 0
    count = [0]

    def fail_late(handler, name, start, stop):
        count[0] += name.endswith(".safetensors") and start > 0
        return count[0] > 8 and (handler.send(403, b"expired") or True)

    hub.faults = [fail_late]
    assert exit_code(*arguments) == 1
    assert "tensors are kept; --resume continues" in capsys.readouterr().err
    hub.faults = []
    assert exit_code(*arguments, "--resume") == 0
    assert "were there from the interrupted job" in capsys.readouterr().err
    assert out.read_bytes() == uninterrupted.read_bytes()


def test_a_damaged_download_is_removed(hub, tmp_path, monkeypatch):
    def damage(handler, name, start, stop):
        if not name.startswith("model-00002-of"):
            return False
        data = bytearray((hub.folder / name).read_bytes())
        data[-1] ^= 1
        headers = {"ETag": f'"{hub_server.etag(name, (hub.folder / name).read_bytes())}"', "X-Repo-Commit": COMMIT}
        handler.send(200, bytes(data), headers=headers)
        return True

    hub.faults = [damage]
    with pytest.raises(FormatError, match=r"model-00002-of-00002.safetensors: is not the file that the hub has"):
        open_source(f"hf:{REPO}")
    hub.faults = []
    assert open_source(f"hf:{REPO}").tensors
    before = len(hub.requests)
    hashed = []
    monkeypatch.setattr(fetch, "digest", lambda *a, **k: hashed.append(a))
    open_source(f"hf:{REPO}")
    assert not hashed  # nothing is hashed a second time
    assert not [r for r in hub.requests[before:] if r[0].endswith(".safetensors")]


def test_refused_repositories(hub, monkeypatch, tmp_path):
    with pytest.raises(FormatError, match="no such repository"):
        open_source("hf:mill/nothing")
    (hub.folder / "model-00001-of-00002.safetensors").unlink()
    for remote in (False, True):
        with pytest.raises(FormatError, match="1 of 2 shards are missing, the first is model-00001-of-00002.safetensors"):
            open_source(f"hf:{REPO}", remote=remote)
    for path in [*hub.folder.glob("*.safetensors*"), *(tmp_path / "cache").rglob("*.index.json")]:
        path.unlink()
    with pytest.raises(FormatError, match="there are no safetensors"):
        open_source(f"hf:{REPO}")
    with pytest.raises(PlanError, match="only a repository"):
        open_source(tmp_path, remote=True)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(MillError) as raised:
        open_source(f"hf:{REPO}")
    assert "\n" not in str(raised.value)
    assert TOKEN not in str(raised.value)


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("hf:a/b", ("a/b", None)),
        ("hf:a/b@main", ("a/b", "main")),
        ("hf:gpt2", ("gpt2", None)),
        ("hf:a/b@refs/pr/1", ("a/b", "refs/pr/1")),
    ],
)
def test_parse_repository(text, parsed):
    assert parse_repository(text) == parsed


@pytest.mark.parametrize("text", ["hf:", "hf:a/b/c", "hf:a/b@", "hf:../b c", "hf:a/b@x y"])
def test_parse_repository_refuses(text):
    with pytest.raises(PlanError, match="names no repository"):
        parse_repository(text)


def test_inspect_reads_headers_only(hub, tmp_path, capsys):
    assert exit_code("inspect", f"hf:{REPO}", "--json") == 0
    shown = json.loads(capsys.readouterr().out)
    assert shown["gguf_architecture"] == "llama"
    assert {t["file"] for t in shown["tensors"]} == {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}
    assert not list((tmp_path / "cache").rglob("*.safetensors"))
