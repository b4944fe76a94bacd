"""The processor that kernels are compiled for: the highest level that the one at hand reaches, or a lesser one that
GGUFMILL_CPU (environment) names.

Processors of one level share their kernels, wherever those were compiled. Generated code and the choice of kernels depend on
`target()` alone. A level of `LEVELS` includes what stands before its `<`:

    x86-64     portable < x86-64-v2 < avx2 < avx-vnni
                                      avx2 < avx512 < avx512-vnni < avx512-bf16 < amx
    aarch64    portable < neon < neon-dotprod < neon-i8mm
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from llvmlite.binding import llvm_version_info
from numba.core import config
from numba.core.codegen import get_host_cpu_features
from numba.core.registry import cpu_target

from ..data_classes import dataclass
from ..errors import MillError
from . import host_cpu

VARIABLE = "GGUFMILL_CPU"
NATIVE = "native"  # as its value: the processor with all that LLVM knows of it, also what no level has

Form = TypeVar("Form")
Forms = tuple[tuple[tuple[str, ...], Form], ...]


class Level(NamedTuple):
    """architecture: "" for any; cpu: the processor that LLVM generates code for; below: the level that this one adds to."""

    architecture: str
    cpu: str
    below: str
    adds: str


LEVELS = {
    "portable": Level("", "", "", ""),
    "x86-64-v2": Level("x86_64", "x86-64-v2", "portable", "cx16 popcnt sahf sse3 ssse3 sse4.1 sse4.2"),
    "avx2": Level("x86_64", "x86-64-v3", "x86-64-v2", "avx avx2 bmi bmi2 f16c fma lzcnt movbe"),
    "avx-vnni": Level("x86_64", "x86-64-v3", "avx2", "avxvnni"),
    "avx512": Level("x86_64", "x86-64-v4", "avx2", "avx512f avx512bw avx512cd avx512dq avx512vl"),
    "avx512-vnni": Level("x86_64", "x86-64-v4", "avx512", "avx512vnni"),
    "avx512-bf16": Level("x86_64", "x86-64-v4", "avx512-vnni", "avx512bf16 avx512vbmi avx512vbmi2 avx512bitalg"),
    "amx": Level("x86_64", "x86-64-v4", "avx512-bf16", "amx-tile amx-bf16 amx-int8"),
    "neon": Level("aarch64", "generic", "portable", "neon"),
    "neon-dotprod": Level("aarch64", "generic", "neon", "dotprod"),
    "neon-i8mm": Level("aarch64", "generic", "neon-dotprod", "i8mm"),
}
# Else LLVM makes two instructions of vpdpwssd, where its sum is waited for. Earlier ones than were tried may not know the word.
_TUNING = frozenset({"fast-dpwssd"} if llvm_version_info >= (22,) else ())
_PORTABLE_CPU = {"x86_64": "x86-64"}  # else "generic"


@dataclass(frozen=True)
class Target:
    """A processor, as far as kernels are concerned.

    level         the highest of LEVELS that it reaches
    architecture  "x86_64", "aarch64", ...
    cpu           LLVM's name of the processor that code is generated for
    features      what kernels may use, as LLVM spells it
    """

    level: str
    architecture: str
    cpu: str
    features: frozenset[str]

    def has(self, *features: str) -> bool:
        """Whether all of these features (as LLVM spells them) may be used."""
        return self.features.issuperset(features)

    def choose(self, forms: Forms[Form]) -> Form:
        """The first form of a table of (features, form) whose features may be used."""
        return next(form for features, form in forms if self.has(*features))

    @property
    def levels(self) -> list[str]:
        """The levels of LEVELS that this target has all features of: each of them can be compiled for it."""
        return [level for level in levels_here() if self.features.issuperset(_features(level))]

    @property
    def flags(self) -> str:
        """The features as LLVM takes them, and how it is to choose among instructions: "+avx,+avx2"."""
        return _flags(self.features | (_TUNING if self.has_vnni else frozenset()))

    @property
    def vector_bits(self) -> int:
        """The width of a vector register."""
        return 512 if self.has("avx512f") else 256 if self.has("avx2") else 128

    @property
    def lane_registers(self) -> int:
        """How many values of sixteen 32-bit lanes the vector registers hold together: AVX-512 32, AVX2 and NEON 8, SSE 4."""
        count = 32 if self.has("avx512f") or self.architecture == "aarch64" else 16
        return count * self.vector_bits // 512

    @property
    def permutes_in_halves(self) -> bool:
        """Vectors have 256 bits, of which one instruction permutes bytes within each half (AVX2 without AVX-512)."""
        return self.vector_bits == 256

    @property
    def has_vnni(self) -> bool:
        """Dot products of bytes on 512-bit vectors (vpdpbusd)."""
        return self.has("avx512f", "avx512vnni")

    @property
    def has_avx_vnni(self) -> bool:
        """The same on 256-bit vectors, for processors without AVX-512."""
        return self.has("avxvnni")

    @property
    def has_bf16_dots(self) -> bool:
        """Dot products of pairs of bf16 on 512-bit vectors (vdpbf16ps)."""
        return self.has("avx512f", "avx512bf16")

    @property
    def has_half(self) -> bool:
        """Conversion between float16 and float32."""
        return self.has("f16c") or self.has("neon")

    @property
    def has_fma(self) -> bool:
        """Fused multiply-add; elsewhere it is a call of the C library per element, with the same result."""
        return self.has("fma") or self.has("neon")

    @property
    def has_amx(self) -> bool:
        """The tile unit with products of bf16, and the operating system's leave to use it (asked for here)."""
        return self.has("avx512f", "amx-tile", "amx-bf16") and host_cpu.request_tiles()


@cache
def target() -> Target:
    """The target of this process, which GGUFMILL_CPU may name. numba generates code for it from then on.

    Where numba has compiled something before, or has variables of its own (NUMBA_CPU_NAME), and on a processor of no level, it
    is the processor as it is. Raises MillError for a level that does not exist or that this processor cannot execute.
    """
    name = os.environ.get(VARIABLE)
    own = config.CPU_NAME or config.CPU_FEATURES is not None or _context() is not None  # type: ignore[attr-defined]
    if not name:
        name = NATIVE if own or len(levels_here()) == 1 else levels_here()[-1]
    if name == NATIVE:
        return _native()
    chosen = target_at(name)
    _configure(chosen.cpu, chosen.flags)
    return chosen


def _native() -> Target:
    cpu: str = config.CPU_NAME or host_cpu.name()  # type: ignore[attr-defined]
    flags: str | None = config.CPU_FEATURES  # type: ignore[attr-defined]
    if flags is None:
        flags = get_host_cpu_features()
        unlisted = host_cpu.features() - {flag[1:] for flag in flags.split(",")}
        if unlisted:
            flags = ",".join(filter(None, (flags, _flags(unlisted))))
            _configure(cpu, flags)
    features = frozenset(flag[1:] for flag in flags.split(",") if flag.startswith("+"))
    reached = [level for level in LEVELS if _runs_on(level) and _features(level) <= features]
    return Target(reached[-1], host_cpu.architecture(), cpu, features)


def target_at(level: str) -> Target:
    """The target that a level of LEVELS stands for. Raises MillError as `target` does."""
    if level not in LEVELS:
        raise MillError(f"{VARIABLE}={level}: there is no such level; there are {', '.join(LEVELS)}")
    if level not in levels_here():
        raise MillError(f"{VARIABLE}={level}: this processor cannot execute that; it can {', '.join(levels_here())}")
    return foreign_target(level)


def foreign_target(level: str) -> Target:
    """The target that a level of LEVELS stands for, whether or not this processor can execute it: for code that is only looked
    at (`assembly`)."""
    architecture = LEVELS[level].architecture or host_cpu.architecture()
    cpu = LEVELS[level].cpu or _PORTABLE_CPU.get(architecture, "generic")
    return Target(level, architecture, cpu, _features(level))


@cache
def levels_here() -> list[str]:
    """The levels that this processor can execute."""
    levels = [level for level in LEVELS if _runs_on(level) and _features(level) <= host_cpu.features()]
    return [level for level in levels if level != "amx" or host_cpu.request_tiles()]


def _runs_on(level: str) -> bool:
    return LEVELS[level].architecture in ("", host_cpu.architecture())


def _features(level: str) -> frozenset[str]:
    """What a level adds to those below it, and they."""
    features: set[str] = set()
    while level:
        features.update(LEVELS[level].adds.split())
        level = LEVELS[level].below
    return frozenset(features)


def _flags(features: Iterable[str]) -> str:
    return ",".join(f"+{feature}" for feature in sorted(features))


def _context() -> Any:
    """numba's code generator; None while it has compiled nothing."""
    return vars(cpu_target).get("_toplevel_target_context")


def _configure(cpu: str, flags: str) -> None:
    """Has numba generate code for a processor."""
    context = _context()
    if context is not None and context.codegen().magic_tuple()[1:] != (cpu, flags):
        raise MillError(f"{VARIABLE} takes effect only before numba compiles anything: import ggufmill's modules first")
    config.CPU_NAME, config.CPU_FEATURES = cpu, flags  # type: ignore[attr-defined]
