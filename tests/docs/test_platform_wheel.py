"""The wheel of a platform is the one for all, with archives of kernels, and its list of files is right."""

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path

FILE = Path(__file__).parents[2] / "docs" / "platform_wheel.py"


def test_wheel_with_packs(tmp_path):
    spec = importlib.util.spec_from_file_location("platform_wheel", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
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
