"""Processors: how many this process may use, what they are called, and what only the system knows of them."""

from __future__ import annotations

import ctypes
import os
import platform
import sys
from pathlib import Path

from .process import c_function

_ARCHITECTURES = {"amd64": "x86_64", "x64": "x86_64", "arm64": "aarch64"}
_SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_PERM, _ARCH_REQ_XCOMP_PERM = 158, 0x1022, 0x1023  # asm/prctl.h of Linux on x86-64


def available_cpus() -> int:
    """Logical processors that this process may run on; all of the machine's where the system has no affinities (macOS,
    Windows)."""
    return len(allowed_cpus())


def allowed_cpus() -> list[int]:
    """The numbers of these processors, ascending."""
    get_affinity = getattr(os, "sched_getaffinity", None)
    return sorted(get_affinity(0)) if get_affinity is not None else list(range(os.cpu_count() or 1))


def may_have_accelerators() -> bool:
    """Whether a GPU of which torch knows may be here: on Linux, whether there is a device file of one; elsewhere True."""
    if sys.platform != "linux":
        return True
    return any(Path(path).exists() for path in ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/kfd", "/dev/dri", "/dev/dxg"))


def architecture() -> str:
    """ "x86_64", "aarch64", or what the system calls it."""
    machine = platform.machine().lower()
    return _ARCHITECTURES.get(machine, machine)


def processor_name() -> str:
    """What the processor is called: "AMD EPYC 9B14". The architecture where the system does not say more."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text("utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def arm_has(entry: int, bit: int, mac_name: str) -> bool:
    """Whether an ARM processor has a feature: a bit of an entry of Linux's auxiliary vector, a name under macOS. False on
    Windows."""
    if sys.platform == "darwin":
        sysctl, value, size = c_function("sysctlbyname"), ctypes.c_int(0), ctypes.c_size_t(4)
        name = f"hw.optional.arm.{mac_name}".encode()
        return sysctl is not None and sysctl(name, ctypes.byref(value), ctypes.byref(size), None, 0) == 0 and value.value == 1
    getauxval = c_function("getauxval")
    if getauxval is None:
        return False
    getauxval.restype, getauxval.argtypes = ctypes.c_ulong, [ctypes.c_ulong]  # type: ignore[attr-defined]
    return bool(getauxval(entry) >> bit & 1)


def request_state(number: int) -> bool:
    """Asks for leave to use registers of x86-64 that take much space, such as those of the tile unit; number: their component
    of XCR0. Whether this process may use them now. Linux gives it once per process, for threads that start later too; False on
    other systems."""
    syscall = c_function("syscall")
    if sys.platform != "linux" or syscall is None:
        return False
    granted = ctypes.c_uint64(0)
    calls = ((_ARCH_REQ_XCOMP_PERM, ctypes.c_ulong(number)), (_ARCH_GET_XCOMP_PERM, ctypes.byref(granted)))
    for request, argument in calls:
        if ctypes.c_int(syscall(ctypes.c_long(_SYS_ARCH_PRCTL), ctypes.c_long(request), argument)).value != 0:
            return False
    return bool(granted.value >> number & 1)
