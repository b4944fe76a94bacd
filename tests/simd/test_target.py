"""What the processor can do, and lesser ones that it pretends to be."""

import json
import os
import subprocess
import sys

import pytest

from ggufmill.formats import MillError
from ggufmill.simd import host_cpu
from ggufmill.simd import target as module
from ggufmill.simd.compile import kernel
from ggufmill.simd.target import LEVELS, Target, levels_here, target_at

X86 = frozenset(
    "sse3 ssse3 sse4.1 sse4.2 popcnt cx16 sahf avx avx2 bmi bmi2 f16c fma lzcnt movbe avxvnni avx512f avx512bw avx512cd "  # noqa: SIM905
    "avx512dq avx512vl avx512vnni avx512bf16 avx512vbmi avx512vbmi2 avx512bitalg amx-tile amx-bf16 amx-int8".split()
)
ARM = frozenset({"neon", "dotprod", "i8mm"})


@pytest.fixture
def pretend(monkeypatch):
    """Makes the machine another one, for questions only."""

    def pretend(architecture, features, tiles=True):
        monkeypatch.setattr(host_cpu, "architecture", lambda: architecture)
        monkeypatch.setattr(host_cpu, "features", lambda: frozenset(features))
        monkeypatch.setattr(host_cpu, "request_tiles", lambda: tiles)
        levels_here.cache_clear()

    yield pretend
    levels_here.cache_clear()


def test_levels_add_up():
    for name, level in LEVELS.items():
        seen = [name]
        while LEVELS[seen[-1]].below:
            seen.append(LEVELS[seen[-1]].below)
            assert LEVELS[seen[-1]].architecture in ("", level.architecture)
        assert seen[-1] == "portable"


def test_what_levels_have(pretend):
    pretend("x86_64", X86)
    expected = {  # vector bits, values of sixteen lanes in registers, dot products
        "portable": (128, 4, ""),
        "x86-64-v2": (128, 4, ""),
        "avx2": (256, 8, ""),
        "avx-vnni": (256, 8, "avx_vnni"),
        "avx512": (512, 32, ""),
        "avx512-vnni": (512, 32, "vnni"),
        "avx512-bf16": (512, 32, "vnni bf16_dots"),
        "amx": (512, 32, "vnni bf16_dots amx"),
    }
    assert levels_here() == list(expected)
    for level, (bits, registers, dots) in expected.items():
        at = target_at(level)
        assert (at.level, at.vector_bits, at.lane_registers) == (level, bits, registers)
        has = {name for name in ("vnni", "avx_vnni", "bf16_dots", "amx") if getattr(at, f"has_{name}")}
        assert has == set(dots.split())
        assert at.has_half == at.has_fma == (bits > 128)
    pretend("aarch64", ARM)
    assert levels_here() == ["portable", "neon", "neon-dotprod", "neon-i8mm"]
    assert [target_at(level).has("dotprod") for level in levels_here()] == [False, False, True, True]
    assert [target_at(level).has("i8mm") for level in levels_here()] == [False, False, False, True]
    assert {target_at(level).lane_registers for level in levels_here()} == {8}
    assert target_at("portable").cpu == "generic"


def test_a_processor_executes_what_it_has(pretend):
    pretend("x86_64", X86 - {"avx512vnni", "avxvnni"})
    assert levels_here() == ["portable", "x86-64-v2", "avx2", "avx512"]
    pretend("x86_64", X86, tiles=False)
    assert "amx" not in levels_here()
    pretend("riscv64", {"v"})
    assert levels_here() == ["portable"]
    with pytest.raises(MillError, match="GGUFMILL_CPU=avx2: this processor cannot execute that; it can portable$"):
        target_at("avx2")
    with pytest.raises(MillError, match="GGUFMILL_CPU=sse9: there is no such level; there are portable, .*neon-i8mm$"):
        target_at("sse9")


def test_choice_takes_the_first_form_that_can_be_executed():
    forms = ((("a", "b"), 1), (("a",), 2), ((), 3))
    chosen = [Target("", "", "", frozenset(features)).choose(forms) for features in ("ab", "a", "b", "")]
    assert chosen == [1, 2, 3, 3]


PROGRAM = """
import json
import numba
from ggufmill.simd.compile import kernel
from ggufmill.simd.target import target

@kernel
def f(x):
    return x + 1

f(1)
_, cpu, flags = f.targetctx.codegen().magic_tuple()
print(json.dumps([target().level, target().cpu, sorted(target().features), cpu, flags]))
"""


def run(environment):
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("NUMBA_CPU", "GGUFMILL_CPU"))}
    return subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, env=inherited | environment)


@pytest.mark.process
@pytest.mark.parametrize("level", ["", *levels_here()])
def test_numba_generates_code_for_the_target(level, tmp_path):
    done = run({"GGUFMILL_CPU": level, "GGUFMILL_CACHE": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    name, cpu, features, numba_cpu, flags = json.loads(done.stdout)
    assert cpu == numba_cpu
    assert features == sorted({flag[1:] for flag in flags.split(",") if flag.startswith("+")} - module._TUNING)
    assert name == (level or levels_here()[-1])
    if level:
        assert set(features) <= host_cpu.features()


def test_numbas_own_variables_are_heeded(tmp_path):
    done = run({"NUMBA_CPU_NAME": "generic", "GGUFMILL_CACHE": str(tmp_path)})
    assert json.loads(done.stdout)[:4] == ["portable", "generic", [], "generic"]


@pytest.mark.parametrize("name", ["amx2", "avx2 ", "neon" if host_cpu.architecture() == "x86_64" else "avx2"])
def test_a_wrong_level_is_refused_in_one_line(name):
    program = "from ggufmill.simd.target import target; target()"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env={"GGUFMILL_CPU": name})
    assert done.returncode == 1
    assert f"MillError: GGUFMILL_CPU={name}: " in done.stderr.splitlines()[-1]


def test_too_late():
    """Code that numba has generated for another processor cannot be taken back."""
    kernel(lambda x: x)(1)
    with pytest.raises(MillError, match="GGUFMILL_CPU takes effect only before numba compiles"):
        module._configure("x86-64", "")
