import shutil
import subprocess
import sys
import textwrap

import pytest

from ggufmill.formats import MillError
from ggufmill.simd import compile as kernels

IMPORTS = (
    "from .callee import FACTOR\n",
    "from . import os, callee\n",
    "from .nothing import (\n    x,\n)\nfrom . import (\n    x,  # y\n    callee as c,\n)\n",
    "def f():\n    from ..package.callee import FACTOR\n",
)


@pytest.mark.parametrize("source", IMPORTS)
def test_an_edit_in_an_imported_file_is_not_served_stale(tmp_path, monkeypatch, source):
    """numba's own cache would go on with the old callee: here the folder's key changes with every file that is imported."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "callee.py").write_text("FACTOR = 10\n")
    (package / "caller.py").write_text(source)
    monkeypatch.setattr(kernels, "ROOT", package)

    def folder():
        kernels._folder.cache_clear()
        kernels._imports.cache_clear()
        return kernels._folder(package / "caller.py")

    before = folder()
    assert folder() == before
    (package / "callee.py").write_text("FACTOR = 1000\n")
    edited = folder()
    assert edited != before
    (package / "table.npz").write_bytes(b"1")
    assert folder() not in (before, edited)
    (package / "stranger.py").write_text("X = 1\n")
    after_stranger = folder()
    (package / "stranger.py").write_text("X = 2\n")
    assert folder() == after_stranger


JOB = textwrap.dedent("""
    import numpy as np
    from ggufmill.formats.floats import bf16_to_f32
    print(bf16_to_f32(np.array([0x3F80, 0xC000], np.uint16)).tolist())
    bf16_to_f32(np.zeros((2, 3), np.uint16))
""")


def test_compiling_is_said_once_and_not_done_twice(tmp_path):
    environment = {"GGUFMILL_CACHE": str(tmp_path), "PATH": "/usr/bin:/bin"}
    options = {"capture_output": True, "text": True, "check": True, "env": environment}
    runs = [subprocess.run([sys.executable, "-c", JOB], **options) for _ in range(2)]
    assert [run.stdout for run in runs] == ["[1.0, -2.0]\n"] * 2
    assert runs[0].stderr.count("compiling kernels") == 1
    assert runs[1].stderr == ""


def test_the_folder_that_is_said_is_the_one_that_is_used(tmp_path):
    """Where ours cannot be written to, numba looks for another."""
    (tmp_path / "file").write_text("no folder")
    package = tmp_path / "ggufmill"
    for room in ("formats", "simd"):
        shutil.copytree(kernels.ROOT / room, package / room, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(kernels.ROOT / "errors.py", package / "errors.py")
    (package / "__init__.py").write_text("")
    environment = {"GGUFMILL_CACHE": str(tmp_path / "file"), "PATH": "/usr/bin:/bin", "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, check=True, env=environment)
    said = done.stderr.split("kept in ")[1].rstrip(")\n")
    assert said == str(package / "formats" / "__pycache__")
    assert list((package / "formats" / "__pycache__").glob("*.nbi"))


def test_a_processor_without_half_precision_is_told(monkeypatch):
    monkeypatch.setattr(kernels.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(kernels, "get_host_cpu_features", lambda: {"avx": True})
    kernels._check_processor.cache_clear()
    with pytest.raises(MillError, match="lacks F16C"):
        kernels.kernel(lambda x: x)
    kernels._check_processor.cache_clear()


def test_nowhere_to_keep_kernels(monkeypatch):
    for name in ("GGUFMILL_CACHE", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.setenv(name, "/dev/null/nothing")
    found = {}
    exec(compile("def f(x):\n    return x\n", "/proc/version", "exec"), found)  # a file in a folder where none can be made
    with pytest.raises(MillError, match="/dev/null/nothing cannot be written to.*GGUFMILL_CACHE"):
        kernels.kernel(found["f"])
