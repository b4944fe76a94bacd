"""Paths of Windows, names of files that every system takes, line ends, and consoles that lack characters."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from ggufmill import hash_model, quantize_model
from ggufmill.convert.hub.fetch import is_repository
from ggufmill.errors import CheckFailed
from ggufmill.formats import TYPES, open_gguf
from ggufmill.imatrix.texts import parse_text
from ggufmill.jobs.execute import execute
from ggufmill.jobs.journal import Journal
from ggufmill.jobs.outputs import Output
from ggufmill.jobs.plan import make_plan
from ggufmill.pipeline.stages.folder import RunFolder
from ggufmill.quantize.recipes.recipe import PATH_KEYS, load_recipe, strip_folders
from ggufmill.recipes import FOLDER
from ggufmill.simd.compile.kernel_cache import module_folder

RESERVED = set('<>:"/\\|?*') | {chr(i) for i in range(32)}  # Windows refuses them in names of files


def small_plan(path, **options):
    x = np.arange(64, dtype=np.float32).view(np.uint8).reshape(2, 128)
    outputs = [Output(f"t{i}", (32, 2), "f32", TYPES["f32"], "test", lambda a, b: x[a:b]) for i in range(2)]
    return make_plan(outputs, {"general.name": "größe 漢字"}, path, **options)


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        (r"model = 'C:\models\demo'", "model = 'demo'"),
        (r'text = "C:\\texts\\a.txt"', 'text = "a.txt"'),
        (r"file = '\\server\share\x.imatrix'", "file = 'x.imatrix'"),
        ("text = 'D:/texts/a.txt'", "text = 'a.txt'"),
        ("model = 'hf:Qwen/Qwen3-8B'", "model = 'hf:Qwen/Qwen3-8B'"),
        (r"rules = 'blk\.1=q8_0'", r"rules = 'blk\.1=q8_0'"),
        ("lora = ['/home/me/a', \"b/c.gguf=0.5\" ,\n 'd',]", "lora = ['a', \"c.gguf=0.5\" ,\n 'd',]"),
        *((f"{key} = '/home/me/x.y'\n", f"{key} = 'x.y'\n") for key in PATH_KEYS),
    ],
)
def test_published_recipes_name_no_folders(recipe, expected):
    assert strip_folders(recipe) == expected


@pytest.mark.parametrize("path", ["C:\\texts\\a.txt", "\\\\server\\share\\a.txt", "a.txt"])
def test_drive_letters_are_no_weights(tmp_path, monkeypatch, path):
    """-f PATH:WEIGHT"""
    monkeypatch.chdir(tmp_path)
    Path(path).write_text("text", "utf-8")  # an ordinary name here
    assert (parse_text(path).path, parse_text(path).weight) == (Path(path), 1)
    assert (parse_text(f"{path}:3").path, parse_text(f"{path}:3").weight) == (Path(path), 3)
    assert not is_repository(path)


@pytest.mark.parametrize("folder", ["C:\\models\\", "\\\\server\\share\\", "D:/models/", "/models/", ""])
def test_manifests_of_any_system(tmp_path, folder):
    execute(small_plan(tmp_path / "a.gguf"))
    manifest = tmp_path / "a.manifest"
    lines = "".join(f"{entry.line()}\r\n" for entry in hash_model(tmp_path / "a.gguf", sha256=True).hashes)
    manifest.write_bytes(lines.replace(f"{tmp_path}/", folder).encode())
    assert set(hash_model(tmp_path / "a.gguf", check=manifest).verdicts) == {"Ok"}
    manifest.write_bytes(manifest.read_bytes().replace(b"a.gguf:t1", b"a.gguf:t2"))
    with pytest.raises(CheckFailed):
        hash_model(tmp_path / "a.gguf", check=manifest)


def test_names_are_taken_by_every_system(tmp_path):
    plan = small_plan(tmp_path / "model.gguf", split_max_tensors=1)
    folder = RunFolder(tmp_path, "recipe")
    made = [*(file.path for file in plan.files), *(file.part for file in plan.files), Journal(plan).path]
    made += [folder.gguf, folder.imatrix, folder.state, folder.recipe, folder.measurements, folder.repacked, *folder.reports]
    made.append(module_folder(Path(sys.modules[RunFolder.__module__].__file__)))
    for path in made:
        assert not set(path.name) & RESERVED, path
        assert path.name == path.name.rstrip(". ")


def test_long_paths(tmp_path):
    folder = tmp_path.joinpath(*["a folder whose name is not short"] * 12)
    result = execute(small_plan(folder / "model.gguf"))
    assert len(str(result.paths[0])) > 400
    assert list(open_gguf(result.paths[0]).tensors) == ["t0", "t1"]


RECIPE = "# comment\nblk\\.0=q8_0\n\nexps=iq4_k_r4 # why\n"
SCRIPT = '#!/bin/sh\ncustom="\n# comment\nblk\\.0=q8_0\nexps=iq4_k_r4\n"\nllama-quantize --custom-q "$custom" a b IQ4_K\n'
TOML = "[source]\nmodel = 'x'\n[quantize]\nrules = '''\nblk\\.0=q8_0\nexps=iq4_k_r4\n'''\n"


@pytest.mark.parametrize(("name", "text"), [("r.txt", RECIPE), ("r.sh", SCRIPT), ("r.toml", TOML)])
def test_line_ends_of_recipes(tmp_path, name, text):
    (tmp_path / name).write_bytes(text.encode())
    unix = load_recipe(tmp_path / name)
    (tmp_path / name).write_bytes(text.replace("\n", "\r\n").encode())
    windows = load_recipe(tmp_path / name)
    assert [str(rule) for rule in windows.rules] == [r"blk\.0=q8_0", "exps=iq4_k_r4"]
    assert windows.rules == unix.rules
    assert windows.text == unix.text


def test_files_are_written_with_line_feeds_only(tmp_path):
    result = quantize_model(FOLDER / "demo", tmp_path / "a.gguf", "q8_0", manifest=True, threads=1)
    assert result.manifest is not None
    journal = Journal(small_plan(tmp_path / "b.gguf"))
    journal.start()
    journal.close()
    for path in (result.manifest, journal.path):
        assert b"\n" in path.read_bytes()
        assert b"\r" not in path.read_bytes()


@pytest.mark.process
@pytest.mark.parametrize("encoding", ["ascii", "cp1252", "cp437", "utf-8"])
def test_consoles_that_lack_characters(tmp_path, encoding):
    """Names and progress bars are written with escapes where the console has no such character."""
    name = "größe 漢字.gguf"
    execute(small_plan(tmp_path / name))
    environment = {**os.environ, "PYTHONIOENCODING": encoding, "PYTHONUTF8": "0"}

    def mill(*words):
        command = [sys.executable, "-m", "ggufmill", *words]
        return subprocess.run(command, capture_output=True, cwd=tmp_path, env=environment, timeout=120)

    shown = mill("inspect", name)
    assert shown.returncode == 0, shown.stderr
    assert ("größe 漢字" if encoding == "utf-8" else "\\u6f22\\u5b57") in shown.stdout.decode(encoding)
    written = mill("quantize", name, "漢.gguf", "q8_0", "--verify")
    assert written.returncode == 0, written.stderr
    written.stderr.decode(encoding)
    failed = mill("inspect", "漢字.gguf")
    assert failed.returncode != 0
    assert failed.stderr.decode(encoding).count("\n") == 1
