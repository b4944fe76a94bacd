"""`ggufmill inspect --cpu`."""

import json
import os
import subprocess
import sys

import pytest

from ggufmill.simd.cpu_summary import _instructions
from ggufmill.simd.target import Target, levels_here, target


def inspect(*arguments, **environment):
    program = [sys.executable, "-m", "ggufmill", "inspect", *arguments]
    return subprocess.run(program, capture_output=True, text=True, env={**os.environ, **environment}, cwd="/")


def test_what_is_there_and_what_is_used(tmp_path):
    native = json.loads(inspect("--cpu", "--json", GGUFMILL_CACHE=str(tmp_path), GGUFMILL_CPU="").stdout)
    assert native["levels"] == levels_here()
    assert (native["level"], native["pretended"]) == (levels_here()[-1], False)
    assert native["kernels"] == str(tmp_path / "kernels")
    lesser = json.loads(inspect("--cpu", "--json", GGUFMILL_CPU="portable").stdout)
    assert (lesser["level"], lesser["pretended"], lesser["features"], lesser["vector_bits"]) == ("portable", True, [], 128)
    assert lesser["levels"] == native["levels"]
    assert set(lesser["instructions"].values()) == {"portable", "as float32"}


def test_table_for_people():
    lines = dict(line.split("  ", 1) for line in inspect("--cpu").stdout.splitlines()[2:])
    assert lines["level in use"].strip().startswith(target().level)
    assert lines["levels it can execute"].strip() == ", ".join(levels_here())


def test_a_wrong_level_is_one_line():
    done = inspect("--cpu", GGUFMILL_CPU="avx3")
    assert done.returncode == 1
    assert done.stdout == ""
    (line,) = done.stderr.splitlines()
    assert line.startswith("ggufmill: GGUFMILL_CPU=avx3: there is no such level; there are portable, ")


@pytest.mark.parametrize("arguments", [[], ["--cpu", __file__]])
def test_a_file_or_the_processor(arguments):
    done = inspect(*arguments)
    assert done.returncode == 2
    assert "give a FILE, or --cpu without one" in done.stderr


@pytest.mark.parametrize(
    ("features", "dots", "look_ups"),
    [
        ("avx512f avx512bw avx512vnni avx512vbmi avx2 ssse3", "vpdpbusd (512 bits)", "vpermb (512 bits)"),
        ("avx512f avx512bw avx2 ssse3", "pmaddwd (512 bits)", "pshufb (512 bits)"),
        ("avx2 ssse3 avxvnni", "vpdpbusd (256 bits)", "pshufb (256 bits)"),
        ("avx2 ssse3", "pmaddwd (256 bits)", "pshufb (256 bits)"),
        ("neon dotprod i8mm", "usdot (128 bits)", "tbl (128 bits)"),
        ("neon dotprod", "sdot (128 bits)", "tbl (128 bits)"),
        ("", "portable", "portable"),
    ],
)
def test_instructions(features, dots, look_ups):
    used = _instructions(Target("", "", "", frozenset(features.split())))
    assert (used["dot products of bytes"], used["look-ups of bytes"]) == (dots, look_ups)
