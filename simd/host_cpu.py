"""What the machine says about its processor: architecture, features as LLVM spells them, leave to use the tile unit (AMX)."""

from __future__ import annotations

from functools import cache

from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

from ..operating_system.processors import architecture, arm_has, request_state

__all__ = ["architecture", "features", "name", "request_tiles"]

# LLVM reads the features of an ARM processor from its name, and does not list those that it takes for granted with the name.
_ARM_FEATURES = {"neon": (16, 1, "AdvSIMD"), "dotprod": (16, 20, "FEAT_DotProd"), "i8mm": (26, 13, "FEAT_I8MM")}
_ARM_FEATURES |= {"bf16": (26, 14, "FEAT_BF16")}  # feature: entry of Linux's auxiliary vector, its bit, name under macOS

_XTILEDATA = 18  # the component of the tile registers


def name() -> str:
    """LLVM's name of the processor: "znver4"."""
    return get_host_cpu_name()


@cache
def features() -> frozenset[str]:
    """What the processor can do, as LLVM spells it: "avx2", "avx512vnni", "dotprod"."""
    try:
        listed = {feature for feature, present in get_host_cpu_features().items() if present}
    except RuntimeError:  # LLVM does not know how to ask
        listed = set()
    if architecture() == "aarch64":
        listed |= {feature for feature, where in _ARM_FEATURES.items() if arm_has(*where)} | {"neon"}
    return frozenset(listed)


@cache
def request_tiles() -> bool:
    """Asks the operating system for the registers of the tile unit; whether this process has them now."""
    return architecture() == "x86_64" and "amx-tile" in features() and request_state(_XTILEDATA)
