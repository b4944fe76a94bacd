"""Kernels on disk: keys, damage, folders that cannot be written to, unused folders."""

import importlib
import os
import pkgutil
import re
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path

import pytest

import ggufmill
from ggufmill.formats import TYPES
from ggufmill.runtime.backends.cpu.kernels.gemm import unpack_panels
from ggufmill.simd.compile import Kernel, kernel_cache
from ggufmill.simd.compile.kernel_cache import delete_unused
from ggufmill.simd.target import levels_here

IMPORTS = (
    "from .callee import FACTOR\n",
    "from . import os, callee\n",
    "from .nothing import (\n    x,\n)\nfrom . import (\n    x,  # y\n    callee as c,\n)\n",
    "def f():\n    from ..package.callee import FACTOR\n",
    "from .face import FACTOR\n",
    "from .face import (\n    F as G,  # renamed\n)\n",
    "from . import face\n",
    "from .face import DEFINED\n",
)


@pytest.mark.parametrize("source", IMPORTS)
def test_an_edit_in_an_imported_file_is_not_served_stale(tmp_path, monkeypatch, source):
    """numba's own cache would go on with the old callee: here the folder's key changes with every file that is imported."""
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "callee.py").write_text("FACTOR = 10\n")
    (package / "caller.py").write_text(source)
    face = package / "face"
    face.mkdir()
    (face / "__init__.py").write_text("from ..callee import FACTOR, FACTOR as F\nfrom .other import OTHER\nDEFINED = FACTOR\n")
    (face / "other.py").write_text("OTHER = 1\n")
    monkeypatch.setattr(kernel_cache, "ROOT", package)

    def folder():
        for cached in (
            kernel_cache.module_folder,
            kernel_cache._imports,
            kernel_cache._defining,
            kernel_cache._data_files,
            kernel_cache._content_digest,
        ):
            cached.cache_clear()
        return kernel_cache.module_folder(package / "caller.py")

    before = folder()
    assert folder() == before
    (package / "callee.py").write_text("FACTOR = 1000\n")
    edited = folder()
    assert edited != before
    (package / "table.npz").write_bytes(b"1")
    assert folder() not in (before, edited)
    (package / "stranger.py").write_text("X = 1\n")
    (package / "errors.py").write_text("X = 1\n")
    after_stranger = folder()
    (package / "stranger.py").write_text("X = 2\n")
    (package / "errors.py").write_text("X = 2\n")
    assert folder() == after_stranger
    (face / "other.py").write_text("OTHER = 2\n")
    assert (folder() == after_stranger) == ("import face" not in source and "DEFINED" not in source)


def names_in(code):
    return set(code.co_names).union(*(names_in(each) for each in code.co_consts if isinstance(each, types.CodeType)))


def test_what_kernels_call_is_in_their_digest_and_no_more():
    """Each of ours that the code of a module with kernels names, and what the code of that names; but no reader of files."""
    modules = [
        importlib.import_module(module.name)
        for module in pkgutil.walk_packages(ggufmill.__path__, "ggufmill.")
        if "torch" not in module.name
        and (
            module.name.split(".")[1] in ("simd", "quantize", "convert", "repack", "imatrix")
            or ".backends.cpu.kernels" in module.name
        )
    ]
    of_kernels = [
        m for m in modules if any(isinstance(each, Kernel) and each.__module__ == m.__name__ for each in vars(m).values())
    ]
    assert len(of_kernels) > 40
    for module in of_kernels:
        digested, seen = kernel_cache._closure(Path(module.__file__)), set()
        todo = [each.__wrapped__ for each in vars(module).values() if isinstance(each, Kernel)]
        while todo:
            function = todo.pop()
            if function in seen:
                continue
            seen.add(function)
            assert kernel_cache.ROOT / relative(function) in digested, (module.__name__, function)
            used = [function.__globals__.get(name) for name in names_in(function.__code__)]
            used += [cell.cell_contents for cell in function.__closure__ or ()]
            used = [getattr(each, "__wrapped__", getattr(each, "_defn", each)) for each in used]
            todo += [each for each in used if isinstance(each, types.FunctionType) and each.__module__.startswith("ggufmill.")]
        readers = set() if ".convert." in module.__name__ or ".imatrix." in module.__name__ else {"gguf.py", "source.py"}
        assert {"errors.py", *readers}.isdisjoint(path.name for path in digested), module.__name__


def relative(function):
    return Path(function.__code__.co_filename).relative_to(kernel_cache.ROOT).as_posix()


def test_what_encloses_a_kernel_is_found_again():
    """What unpacks rows of each type: made twice, as in two processes, it has the same key, and one of its own."""
    keys = {}
    for name in TYPES:
        if TYPES[name].is_known and unpack_panels.panel_form(name) is not None:
            make = unpack_panels._plain_part if TYPES[name].rows == 1 else unpack_panels._interleaved_part
            first, second = (kernel_cache._identity(make(name)) for _ in range(2))
            assert first == second, name
            keys[first] = name
    assert len(keys) == len(set(keys.values()))
    assert len(keys) > 50


JOB = textwrap.dedent("""
    import numpy as np
    from ggufmill.formats.floats import bf16_to_f32
    from ggufmill.simd.compile import compile_time
    compile_time._LEAST_SECONDS = 0
    with compile_time.compiling_for("bf16"):
        print(bf16_to_f32(np.array([0x3F80, 0xC000], np.uint16)).tolist())
        bf16_to_f32(np.zeros((2, 3), np.uint16))
""")


def run_job(cache, **environment):
    """The job's stderr; its result is checked."""
    environment = {"GGUFMILL_CACHE": str(cache), "PATH": "/usr/bin:/bin", **environment}
    done = subprocess.run([sys.executable, "-c", JOB], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "[1.0, -2.0]\n"
    return done.stderr


def test_compiling_is_announced_once_and_not_repeated(tmp_path):
    first, *lines = run_job(tmp_path).splitlines()
    assert first == f"compiling kernels (once for this version; cached in {tmp_path})"
    assert [re.sub(r"\d+ s$", "N s", line) for line in lines] == ["compiling kernels for bf16: N s"]
    assert run_job(tmp_path) == ""


@pytest.mark.process
@pytest.mark.parametrize("damage", ["cut", "garbled", "emptied", "gone"])
def test_damaged_kernels_are_compiled_again(tmp_path, damage):
    run_job(tmp_path)
    files = [path for path in (tmp_path / "kernels").rglob("*") if path.is_file() and path.parent.name != "kernels"]
    assert {path.suffix for path in files} == {".kernel"}
    for path in files:
        content = bytearray(path.read_bytes())
        if damage == "cut":
            path.write_bytes(content[: len(content) // 2])
        elif damage == "garbled":
            content[len(content) // 2] ^= 1
            path.write_bytes(content)
        elif damage == "emptied":
            path.write_bytes(b"")
        else:
            path.unlink()
    assert run_job(tmp_path).count("compiling kernels (once") == 1
    assert run_job(tmp_path) == ""


FACTORY = """
from ggufmill.simd.compile import kernel, native_entry

def times(factor):
    @kernel
    def multiplied(x):
        STEPS
        return x

    return multiplied

def entry(factor):
    inner = times(factor)

    def call(x):
        return inner(x) + inner(x + 1)

    return native_entry("int64(int64)", call)
"""


@pytest.mark.process
def test_kernels_of_several_processes_are_told_apart(tmp_path):
    """Two functions of one definition, compiled each as the first of a process, have what they enclose when a third process
    loads both: if what they call had the same names, the second one would call what the first one calls."""
    steps = [f"x = (x * factor + {i}) % {1000 + i}" for i in range(100)]  # so many that a call of them is left a call
    (tmp_path / "factory.py").write_text(FACTORY.replace("STEPS", "\n        ".join(steps)))

    def run(*factors):
        script = "import sys, factory\nfor f in sys.argv[1:]:\n    print(factory.entry(int(f)).ctypes(1))"
        environment = {"GGUFMILL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
        command = [sys.executable, "-c", script, *map(str, factors)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        return [int(word) for word in done.stdout.split()]

    def expected(x, factor):
        for i in range(100):
            x = (x * factor + i) % (1000 + i)
        return x

    results = {factor: expected(1, factor) + expected(2, factor) for factor in (3, 7)}
    for factor, result in results.items():
        assert run(factor) == [result]
    assert run(*results) == list(results.values())


CALLS = """
import numpy as np
from ggufmill.simd.compile import kernel

@kernel
def checked(x):
    if x < 0:
        raise ValueError("negative", x)
    return np.full(3, x).reshape(-1)

@kernel
def call(x, y):
    return checked(x) + checked(y), "named"
"""


def test_stored_kernels_raise_and_return_objects(tmp_path):
    """Of the Python objects beside machine code only those are stored that it reads."""
    (tmp_path / "calls.py").write_text(CALLS)
    script = """
        import calls
        print(calls.call(1, 2), sum(calls.call.stats.cache_hits.values()))
        for x in (1, -1):
            try:
                calls.call(x, -2)
            except ValueError as error:
                print(error.args)
    """
    environment = {"GGUFMILL_CACHE": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path), "PATH": "/usr/bin:/bin"}
    for hits in (0, 1):
        command = [sys.executable, "-c", textwrap.dedent(script)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        result, first, second = done.stdout.splitlines()
        assert result == f"(array([3, 3, 3]), 'named') {hits}"
        assert (first, second) == ("('negative', -2)", "('negative', -1)")


@pytest.mark.process
def test_without_a_writable_folder_every_process_compiles(tmp_path):
    (tmp_path / "file").write_text("no folder")
    for _ in range(2):
        lines = run_job(tmp_path / "file").splitlines()
        lines = [line for line in lines if not line.startswith("compiling kernels for ")]
        assert len(lines) == 2
        assert lines[1].startswith(f"kernels cannot be stored in {tmp_path / 'file'} (Not a directory)")
        assert "GGUFMILL_CACHE" in lines[1]


@pytest.mark.process
def test_levels_do_not_share_kernels(tmp_path):
    levels = levels_here()[-2:]
    for level in levels:
        assert "compiling" in run_job(tmp_path, GGUFMILL_CPU=level)
        assert run_job(tmp_path, GGUFMILL_CPU=level) == ""
    folders = [path.name for path in (tmp_path / "kernels").iterdir() if path.is_dir()]
    assert len(folders) == len(levels)


def test_folders_that_nobody_uses_are_deleted(tmp_path):
    kernels, now = tmp_path / "kernels", time.time()
    ages = {
        "formats.floats-0123456789abcdef": 31,
        "gone.module-fedcba9876543210": 400,
        "simd.lanes-0123456789abcdef": 29,
        "simd.lanes-fedcba9876543210": 0,
        "not ours": 400,
        "simd.lanes-0123": 400,
    }
    for name, days in ages.items():
        (kernels / name).mkdir(parents=True)
        (kernels / name / "f.kernel").write_text("x")
        os.utime(kernels / name, (now, now - days * 86400))
    elsewhere = tmp_path / "linked-0123456789abcdef"
    elsewhere.mkdir()
    (elsewhere / "precious").write_text("x")
    os.utime(elsewhere, (now, now - 4e7))
    (kernels / "linked-0123456789abcdef").symlink_to(elsewhere)
    deleted = {path.name for path in delete_unused(tmp_path)}
    assert deleted == {"formats.floats-0123456789abcdef", "gone.module-fedcba9876543210"}
    left = {path.name for path in kernels.iterdir() if path.is_dir()}
    assert left == {*ages, "linked-0123456789abcdef"} - deleted
    assert (elsewhere / "precious").exists()
    os.utime(kernels / "simd.lanes-0123456789abcdef", (0, 0))
    assert delete_unused(tmp_path) == []  # it looks once a day
    assert delete_unused(tmp_path / "nothing here") == []


@pytest.mark.process
def test_use_renews_a_folder(tmp_path):
    run_job(tmp_path)
    (folder,) = (path for path in (tmp_path / "kernels").iterdir() if path.is_dir())
    os.utime(folder, (0, 0))
    run_job(tmp_path)
    assert time.time() - folder.stat().st_mtime < 3600


def test_what_is_kept_is_made_once_and_again_if_damaged(tmp_path, monkeypatch):
    source, made = Path(kernel_cache.__file__), []
    monkeypatch.setattr(kernel_cache, "module_folder", lambda source: tmp_path / "kernels")

    def make():
        made.append(None)
        return f"text {len(made)}"

    assert [kernel_cache.kept(source, "a", key, make) for key in (1, 1, 2)] == ["text 1", "text 1", "text 2"]
    for file in (tmp_path / "kernels").iterdir():
        file.write_bytes(file.read_bytes()[:-1] + b"x")
    assert kernel_cache.kept(source, "a", 1, make) == "text 3"
