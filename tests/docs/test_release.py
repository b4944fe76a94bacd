"""A release has the version of the program; the wheel of a platform is the one for all, with kernels and a right list."""

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path

import ggufmill

DOCS = Path(__file__).parents[2] / "docs"


def script(name, monkeypatch):
    monkeypatch.syspath_prepend(DOCS)
    spec = importlib.util.spec_from_file_location(name, DOCS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_release_has_the_version_of_the_program(tmp_path, monkeypatch):
    release = script("release", monkeypatch)
    assert release.version() == ggufmill.__version__
    copy = tmp_path / "version.py"
    copy.write_bytes(release.VERSION_FILE.read_bytes())
    (tmp_path / "CHANGELOG.md").write_text("# Changes\n\n## Unreleased\n\n* one\n")
    monkeypatch.setattr(release, "VERSION_FILE", copy)
    monkeypatch.setattr(release, "ROOT", tmp_path)
    release.set_version("7.8.9")
    assert release.version() == "7.8.9"


def test_wheel_with_packs(tmp_path, monkeypatch):
    module = script("platform_wheel", monkeypatch)
    wheel, pack, about = tmp_path / "ggufmill-1.0-py3-none-any.whl", tmp_path / "avx2-cpython-311.zip", "ggufmill-1.0.dist-info"
    pack.write_bytes(b"kernels")
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("ggufmill/__init__.py", "")
        archive.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{about}/RECORD", "ggufmill/__init__.py,,\n")
    made = module._with_packs(wheel, [pack])
    tag = made.stem.removeprefix("ggufmill-1.0-")
    assert tag.startswith("cp3")
    assert "-none-" in tag
    with zipfile.ZipFile(made) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    assert files["ggufmill/simd/compile/packs/avx2-cpython-311.zip"] == b"kernels"
    assert files[f"{about}/WHEEL"].decode().splitlines() == ["Wheel-Version: 1.0", f"Tag: {tag}"]
    lines = [line.split(",") for line in files[f"{about}/RECORD"].decode().splitlines()]
    assert {name for name, _, _ in lines} == set(files)
    for name, digest, size in lines[:-1]:
        coded = base64.urlsafe_b64encode(hashlib.sha256(files[name]).digest()).decode().rstrip("=")
        assert (digest, size) == (f"sha256={coded}", str(len(files[name])))
