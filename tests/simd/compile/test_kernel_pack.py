"""Kernels that a package brings: nothing is compiled with them, and they are not used for other sources."""

import sys
from importlib.util import module_from_spec, spec_from_file_location

import pytest

from ggufmill.simd.compile import kernel_cache, kernel_pack
from ggufmill.simd.compile.compile_time import compiled_kernels

KERNELS = """
from ggufmill.simd.compile import kernel, native_entry
from numba import types

@kernel
def scaled(x):
    return x * FACTOR

def part(x):
    return scaled(x) + 1

def address():
    return native_entry(types.int64(types.int64), part)
"""


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Calls the kernels of a module, with an empty cache, or with that of a folder -> results, how many were compiled."""

    def run(factor, cache=None):
        module_folder.cache_clear()
        kernel_cache._content_digest.cache_clear()
        cache = cache or tmp_path / f"empty{len(list(tmp_path.iterdir()))}"
        monkeypatch.setattr(kernel_cache, "cache_home", lambda: cache)
        file = tmp_path / "packed.py"
        file.write_text(f"FACTOR = {factor}\n{KERNELS}")
        before, spec = compiled_kernels(), spec_from_file_location("ggufmill.packed", file)
        module = module_from_spec(spec)
        sys.modules[spec.name] = module  # numba looks for it there when it loads kernels
        spec.loader.exec_module(module)
        results = module.scaled(4), module.address().ctypes(5)
        return results, compiled_kernels() - before, list(cache.rglob("*.kernel"))

    module_folder = kernel_cache.module_folder
    yield run
    sys.modules.pop("ggufmill.packed", None)
    module_folder.cache_clear()
    kernel_pack._archive.cache_clear()


def test_nothing_is_compiled_unless_something_differs(run, tmp_path, monkeypatch):
    results, compiled, stored = run(3, tmp_path / "builder")
    assert (results, len(stored)) == ((12, 16), 2)
    assert compiled
    monkeypatch.setattr(kernel_pack, "FOLDER", tmp_path / "packs")
    level = kernel_pack.target().level
    pack = tmp_path / "packs" / kernel_pack.pack_name(level)
    assert kernel_pack.write_pack(tmp_path / "builder" / "kernels", pack) == 2
    assert run(3) == ((12, 16), 0, [])
    results, compiled, stored = run(30)  # sources
    assert (results, len(stored)) == ((120, 151), 2)
    assert compiled
    monkeypatch.setattr(kernel_cache.numba, "__version__", "0.1")
    assert run(3)[1]
    monkeypatch.undo()


@pytest.mark.parametrize("damage", [lambda b: b[: len(b) // 2], lambda b: b[:80] + bytes([b[80] ^ 1]) + b[81:], lambda b: b""])
def test_a_damaged_archive_is_no_worse_than_none(tmp_path, monkeypatch, damage):
    kernels, level = tmp_path / "kernels", kernel_pack.target().level
    (kernels / "a-0").mkdir(parents=True)
    (kernels / "a-0" / "f.kernel").write_bytes(bytes(range(256)))
    monkeypatch.setattr(kernel_pack, "FOLDER", tmp_path)
    pack = tmp_path / kernel_pack.pack_name(level)
    assert kernel_pack.packed("a-0", "f.kernel") is None  # there is none
    kernel_pack._archive.cache_clear()
    kernel_pack.write_pack(kernels, pack)
    assert kernel_pack.packed("a-0", "f.kernel") == bytes(range(256))
    assert kernel_pack.packed("a-1", "f.kernel") is None
    kernel_pack._archive.cache_clear()
    pack.write_bytes(damage(pack.read_bytes()))
    assert kernel_pack.packed("a-0", "f.kernel") is None
    kernel_pack._archive.cache_clear()
