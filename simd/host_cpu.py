"""What the machine says about its processor: architecture, features as LLVM spells them, leave to use the tile unit (AMX)."""

from __future__ import annotations

import ctypes
import platform
import sys
from functools import cache

from llvmlite.binding import get_host_cpu_features, get_host_cpu_name

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}

# LLVM reads the features of an ARM processor from its name, and does not list those that it takes for granted with the name.
_ARM_FEATURES = {"neon": (16, 1, "AdvSIMD"), "dotprod": (16, 20, "FEAT_DotProd"), "i8mm": (26, 13, "FEAT_I8MM")}
_ARM_FEATURES |= {"bf16": (26, 14, "FEAT_BF16")}  # feature: entry of Linux's auxiliary vector, its bit, name under macOS

_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, _ARCH_REQ_XCOMP_PERM, _XTILEDATA = 158, 0x1022, 0x1023, 18


@cache
def architecture() -> str:
    """ "x86_64", "aarch64", or what the system calls it."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


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
        listed |= {feature for feature, where in _ARM_FEATURES.items() if _arm_has(*where)} | {"neon"}
    return frozenset(listed)


def _arm_has(entry: int, bit: int, mac_name: str) -> bool:
    libc = ctypes.CDLL(None)
    if sys.platform == "darwin":
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        name = f"hw.optional.arm.{mac_name}".encode()
        return libc.sysctlbyname(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value == 1
    if not sys.platform.startswith("linux"):
        return False
    libc.getauxval.restype, libc.getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]
    return bool(libc.getauxval(entry) >> bit & 1)


@cache
def request_tiles() -> bool:
    """Asks the operating system for the registers of the tile unit; whether this process has them now.

    It hands them out once per process (Linux: arch_prctl), for threads that start later too."""
    if not sys.platform.startswith("linux") or architecture() != "x86_64" or "amx-tile" not in features():
        return False
    syscall = ctypes.CDLL(None, use_errno=True).syscall
    syscall.restype = ctypes.c_long
    if syscall(_SYS_ARCH_PRCTL, _ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(_XTILEDATA)) != 0:
        return False
    granted = ctypes.c_uint64(0)
    if syscall(_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, ctypes.byref(granted)) != 0:
        return False
    return bool(granted.value >> _XTILEDATA & 1)
