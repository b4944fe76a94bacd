"""Pipes and devices in the place of files are refused: opening one blocks, or reading it never ends."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
_READ = """
import sys
from pathlib import Path
from ggufmill.convert.config import read_json
from ggufmill.errors import FormatError
from ggufmill.formats import open_gguf
from ggufmill.formats.safetensors import read_safetensors
try:
    path = Path(sys.argv[1])
    {"config.json": read_json, "a.safetensors": read_safetensors, "a.gguf": open_gguf}[path.name](path)
except FormatError as error:
    print(error)
"""


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize("name", ["config.json", "a.safetensors", "a.gguf"])
def test_what_is_no_regular_file_is_refused(tmp_path, name, kind):
    path = tmp_path / name
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    done = subprocess.run([sys.executable, "-c", _READ, path], capture_output=True, text=True, check=True, timeout=120)
    assert f"{name}: not a regular file" in done.stdout
