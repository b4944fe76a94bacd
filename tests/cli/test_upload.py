"""`upload` against a stand-in of the Hub: nothing without --yes, nothing unfinished, nothing twice."""

import hashlib
import json
import subprocess
import sys

import pytest

from ggufmill.formats import open_gguf
from ggufmill.pipeline.files.split import split_model
from ggufmill.pipeline.upload import upload_folder
from ggufmill.quantize.planning import plan_quantize

from ..helpers.hub_server import REPO, serving

TOKEN = "hf_secret"
CARD = """---
library_name: gguf
---

llama-server -hf OWNER/NAME:Q8_0

OWNER/NAME is the repository on the Hub that this card is in.
"""


@pytest.fixture
def hub(tmp_path, monkeypatch):
    from huggingface_hub import constants

    (tmp_path / "hub").mkdir()
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    with serving(tmp_path / "hub") as hub:
        hub.exists = False
        monkeypatch.setenv("HF_ENDPOINT", hub.endpoint)
        yield hub


@pytest.fixture
def folder(tmp_path, tiny_llama, write_checkpoint):
    """Two models, one of them split, with checksums and a card."""
    from ggufmill.convert import open_source
    from ggufmill.jobs.execute import execute

    out = tmp_path / "out"
    out.mkdir()
    source = open_source(write_checkpoint(tmp_path / "m", *tiny_llama()))
    execute(plan_quantize(source, out / "m-F32.gguf"))
    split_model(out / "m-F32.gguf", out / "m-split", split_max_tensors=12)
    (out / "README.md").write_text(CARD)
    (out / "state.json").write_text("{}")
    listed = sorted(out.glob("*.gguf"))
    (out / "SHA256SUMS").write_text("".join(f"{sha256(path)}  {path.name}\n" for path in listed))
    return out


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_nothing_is_sent_without_yes(mill, hub, folder):
    code, text, err = mill("upload", folder, "--repo", REPO)
    assert code == 0, err
    assert "nothing was sent: give --yes to send it" in text
    assert f"{hub.endpoint}/{REPO} (private, new)" in text
    names = [line.split()[0] for line in text.splitlines()[2:-2]]
    assert names == [*sorted(path.name for path in folder.glob("*.gguf")), "README.md", "SHA256SUMS"]
    assert all(sha256(folder / name) in text for name in names if name.endswith("gguf"))
    assert (hub.created, hub.commits, hub.received) == (None, [], [])


def test_sent_private_and_not_twice(mill, hub, folder):
    code, text, err = mill("upload", folder, "--repo", REPO, "--yes", "--json")
    assert code == 0, err
    result = json.loads(text)
    assert result["private"]
    assert {file["status"] for file in result["files"]} == {"sent"}
    assert hub.private
    models = sorted(path.name for path in folder.glob("*.gguf"))
    assert hub.commits == [*([name] for name in models), ["README.md", "SHA256SUMS"]]
    assert all((hub.folder / name).read_bytes() == (folder / name).read_bytes() for name in [*models, "SHA256SUMS"])
    assert (hub.folder / "README.md").read_text() == f"---\nlibrary_name: gguf\n---\n\nllama-server -hf {REPO}:Q8_0\n"
    assert open_gguf(hub.folder / models[1]).metadata
    assert TOKEN not in text + err

    received = list(hub.received)
    code, text, err = mill("upload", folder, "--repo", REPO, "--yes", "--public")
    assert code == 0, err
    assert "stays private" in err
    assert hub.received == received
    assert mill("upload", folder, "--repo", REPO)[1].count("there") == len(models) + 2
    (folder / "README.md").write_text("new")
    assert mill("upload", folder, "--repo", REPO, "--yes")[0] == 0
    assert hub.received == [*received, "README.md"]


def test_a_broken_upload_goes_on(mill, hub, folder):
    second = sorted(folder.glob("*.gguf"))[1]
    hub.refuse = lambda digest: digest == sha256(second)
    code, text, err = mill("upload", folder, "--repo", REPO, "--yes", "--public")
    assert code == 1
    assert err.splitlines()[-1].endswith("what was sent is kept, the same command sends the rest")
    assert TOKEN not in text + err
    assert len(hub.commits) == 1
    assert hub.created.get("private") is False or hub.created.get("visibility") == "public"
    received, hub.refuse = list(hub.received), lambda digest: False
    code, _, err = mill("upload", folder, "--repo", REPO, "--yes", "--public")
    assert code == 0, err
    assert hub.received[: len(received)] == received
    assert len(set(hub.received)) == len(hub.received)


def test_without_a_token(mill, hub, folder, monkeypatch, tmp_path):
    from huggingface_hub import constants

    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    code, _, err = mill("upload", folder, "--repo", REPO, "--yes")
    assert code == 1
    assert "`hf auth login`, or the variable HF_TOKEN" in err
    assert hub.created is None


def test_without_a_connection_it_says_what_would_be_sent(mill, folder, monkeypatch):
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    code, text, err = mill("upload", folder, "--repo", REPO)
    assert code == 0, err
    assert all(name in text for name in ("m-F32.gguf", "README.md", "SHA256SUMS"))
    assert text.splitlines()[-1].startswith("note: the hub cannot be reached at http://127.0.0.1:9 (")
    result = json.loads(mill("upload", folder, "--repo", REPO, "--json")[1])
    assert (result["exists"], {file["status"] for file in result["files"]}) == (None, {"to send"})
    code, text, err = mill("upload", folder, "--repo", REPO, "--yes")
    assert (code, text) == (1, "")
    assert err.splitlines()[-1].startswith("ggufmill: the hub cannot be reached at http://127.0.0.1:9 (")
    assert TOKEN not in err


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: (f / "x.gguf.part").write_bytes(b""), "x.gguf.part is left from an unfinished job"),
        (lambda f: (f / "x.gguf.journal").write_bytes(b""), "x.gguf.journal is left from an unfinished job"),
        (lambda f: (f / "m-F32.gguf").unlink(), "lists m-F32.gguf, which does not exist"),
        (lambda f: next(f.glob("*-00002-of*")).unlink(), "which does not exist"),
        (lambda f: (f / "m-F32.gguf").write_bytes((f / "m-F32.gguf").read_bytes()[:-1] + b"x"), "its sha256 is another"),
        (lambda f: (f / "m-F32.gguf").write_bytes((f / "m-F32.gguf").read_bytes()[:-64]), "m-F32.gguf"),
        (lambda f: (f / "SHA256SUMS").write_text("nonsense"), "SHA256SUMS, line 1: not a sha256"),
        (lambda f: (f / "README.md").write_text("> **Not fit to be published.** Too bad."), "beyond the recipe's limits"),
        (
            lambda f: (f / "state.json").write_text('{"quantize": {"key": "", "seconds": 0, "result": null, "files": []}}'),
            "is not finished (quantize)",
        ),
    ],
)
def test_what_is_not_whole_is_refused(mill, hub, folder, harm, message):
    harm(folder)
    code, _, err = mill("upload", folder, "--repo", REPO, "--yes")
    assert code == 1
    assert message in err
    assert err.count("\n") == 1
    assert (hub.created, hub.received) == (None, [])


def test_a_missing_split_without_checksums(mill, hub, folder):
    (folder / "SHA256SUMS").unlink()
    next(folder.glob("*-00002-of*")).unlink()
    code, _, err = mill("upload", folder, "--repo", REPO)
    assert code == 1
    assert "00002-of" in err
    for path in folder.glob("*.gguf"):
        path.unlink()
    assert "has no GGUF file to send" in mill("upload", folder, "--repo", REPO)[2]


def test_names_of_repositories(mill, hub, folder):
    code, _, err = mill("upload", folder, "--repo", "no name/at all")
    assert code == 1
    assert "this is no name of a repository" in err


def test_the_library(hub, folder):
    result = upload_folder(folder, repo=REPO)
    assert not result.sent
    assert result.missing_bytes == sum(file.nbytes for file in result.files)


def test_listing_needs_no_library_of_the_hub_before_it_is_asked():
    code = "import sys; import ggufmill.pipeline.upload; sys.exit('huggingface_hub' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
