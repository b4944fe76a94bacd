"""The program without what only Linux or POSIX has: every module is imported, jobs are interrupted and resumed, models run."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from itertools import chain
from pathlib import Path

import pytest
from module_imports import ROOT, needed_packages

import ggufmill
from ggufmill.recipes import FOLDER

HELPERS = Path(__file__).parents[1] / "helpers"
# Where the packages of pyproject.toml's extras may be imported at import time. Everything else runs without them.
EXTRAS = {
    "gpu": ("ggufmill.quantize.torch_encoders.", "ggufmill.runtime.backends.torch."),
    "cluster": ("ggufmill.pipeline.cluster.file_plugin",),
    "serve": ("ggufmill.runtime.serve",),
}


def run(code, *arguments, cwd, packages_first=()):
    """Runs code in a process of its own, after the calls are taken away."""
    # torch, where it is installed, looks for the C library at its import, and psutil of distributed for `resource`.
    first = "".join(f"try:\n    import {name}\nexcept ImportError:\n    pass\n" for name in packages_first)
    program = first + "import other_system\nother_system.take_away()\n" + code
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HELPERS), *filter(None, sys.path)])}
    command = [sys.executable, "-c", program, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, timeout=300)


IMPORT = """
import importlib, os, sys
assert not hasattr(os, "pread") and not sys.modules["fcntl"]
for name in sys.argv[1].split(): sys.modules[name] = None
for name in sys.argv[2:]: importlib.import_module(name)
"""


def optional_packages():
    """Module -> packages it is not imported without, beyond those that the program depends on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    always = {re.match(r"[\w-]+", d)[0].replace("-", "_").replace("pyyaml", "yaml") for d in project["dependencies"]}
    return {name: found - always - sys.stdlib_module_names for name, found in needed_packages().items()}


def test_every_module_is_imported(tmp_path):
    """Those that need no extra while none can be imported, the others with what is installed."""
    optional = optional_packages()
    plain = [name for name, packages in optional.items() if not packages]
    others = [name for name, packages in optional.items() if packages and all(map(find_spec, packages))]
    assert len(plain) > 250
    assert {"ggufmill", "ggufmill.cli"} < set(plain)
    packages = sorted(set().union(*optional.values()))
    done = run(IMPORT, " ".join(packages), *plain, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    done = run(IMPORT, "", *others, cwd=tmp_path, packages_first=packages)
    assert done.returncode == 0, done.stderr


def test_extras_are_imported_where_they_belong():
    optional = {name: packages for name, packages in optional_packages().items() if packages}
    assert [name for name in optional if not name.startswith(tuple(chain(*EXTRAS.values())))] == []
    for extra, rooms in EXTRAS.items():
        assert any(name.startswith(rooms) for name in optional), extra


INTERRUPTED = """
import sys
from ggufmill.operating_system import files
from ggufmill.errors import MillError
from ggufmill import quantize_model
real, left = files.write_at, [40]
def fails(*arguments):
    left[0] -= 1
    if left[0] < 0:
        raise OSError(28, "No space left on device")
    return real(*arguments)
files.write_at = fails
try:
    quantize_model(sys.argv[1], "out.gguf", "q8_0", custom_q="exps=q4_0", threads=2)
except MillError as error:
    print(error)
files.write_at = real
result = quantize_model(sys.argv[1], "out.gguf", "q8_0", custom_q="exps=q4_0", threads=2, resume=True, verify=True)
print("resumed", result.resumed)
"""
MEASURED = """
import sys
import ggufmill
result = ggufmill.perplexity("out.gguf", sys.argv[1], n_ctx=64, chunks=2, threads=2)
print(result.perplexity)
"""


@pytest.mark.slow
def test_jobs_and_models(tmp_path):
    """Killed by a full disk, resumed, and measured: the same bytes and the same figure as with all calls."""
    for folder in ("other", "here"):
        (tmp_path / folder).mkdir()
    done = run(INTERRUPTED, FOLDER / "demo", cwd=tmp_path / "other")
    assert done.returncode == 0, done.stderr
    assert "--resume continues" in done.stdout
    assert int(done.stdout.rpartition("resumed ")[2]) > 0
    ggufmill.quantize_model(FOLDER / "demo", tmp_path / "here/out.gguf", "q8_0", custom_q="exps=q4_0", threads=2)
    assert (tmp_path / "other/out.gguf").read_bytes() == (tmp_path / "here/out.gguf").read_bytes()
    assert sorted(os.listdir(tmp_path / "other")) == ["out.gguf"]
    text = FOLDER / "demo/heldout.txt"
    done = run(MEASURED, text, cwd=tmp_path / "other")
    assert done.returncode == 0, done.stderr
    expected = ggufmill.perplexity(tmp_path / "here/out.gguf", text, n_ctx=64, chunks=2, threads=2).perplexity
    assert float(done.stdout) == expected


@pytest.mark.slow(keep=["inspect*", "recipes*"])
@pytest.mark.parametrize(
    "verb", ["inspect --cpu", "recipes list", "run demo --dry-run -o out", "generate MODEL -p The -n 3 --temp 0"]
)
def test_verbs(tmp_path, verb):
    words = verb.replace("MODEL", str(FOLDER / "demo")).split()
    done = run("import sys\nfrom ggufmill.cli import main\nmain(sys.argv[1:])", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert os.listdir(tmp_path) == []
