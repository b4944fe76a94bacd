"""The devices that torch finds, by names as llama.cpp has them: CUDA0, XPU0, MPS0; TORCH0 is torch on the processor."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib.util import find_spec
from types import ModuleType

from ...data_classes import dataclass
from ...errors import PlanError, installation
from ...operating_system.memory import free_bytes
from ...operating_system.processors import may_have_accelerators

_KINDS = {"cuda": "CUDA", "xpu": "XPU", "mps": "MPS"}  # torch's name -> ours; ROCm's devices are torch's cuda, too
_NAME = r"(?i)(cuda|xpu|mps|cpu|torch):?(\d*)"


@dataclass(frozen=True)
class TorchDevice:
    """name: as in `-ot`; torch_name: as torch has it; total, free: bytes of memory, None where they are not known."""

    name: str
    torch_name: str
    total: int | None = None
    free: int | None = None


def import_torch(what: str) -> ModuleType:
    """torch. what: is not possible without it. Raises PlanError where it is not installed."""
    try:
        import torch
    except ImportError as error:
        raise PlanError(f"{what} needs torch ({error}): {installation('torch')}") from None
    return torch


def find_devices(what: str = "--device") -> list[TorchDevice]:
    """The accelerators of this machine. Raises PlanError without torch."""
    torch, found = import_torch(what), []
    for kind, name in _KINDS.items():
        module = getattr(torch, kind, None)
        if module is not None and module.is_available():
            count = range(module.device_count())
            found += [TorchDevice(f"{name}{i}", f"{kind}:{i}", *_memory(module, kind, i)) for i in count]
    return found


def accelerators_here() -> tuple[list[TorchDevice], str]:
    """The accelerators of this machine, and why there are none. torch is only imported, which takes seconds, where there may be
    one."""
    if not may_have_accelerators():
        return [], "there is no accelerator here"
    if find_spec("torch") is None:
        return [], f"torch is not installed ({installation('torch')})"
    return find_devices(), "torch finds no accelerator here"


def _memory(module: ModuleType, kind: str, number: int) -> tuple[int | None, int | None]:
    """Bytes in all and free."""
    if kind == "mps":
        total = int(module.recommended_max_memory())
        return total, max(0, total - int(module.driver_allocated_memory()))
    if not hasattr(module, "mem_get_info"):
        return None, None
    free, total = module.mem_get_info(number)
    return int(total), int(free)


def choose_devices(names: Sequence[str]) -> list[TorchDevice]:
    """Devices by names: 'cuda' (all of them), 'cuda:1' or 'CUDA1', 'xpu', 'mps', 'cpu' (torch on the processor; several times:
    as several devices), 'auto' (all accelerators, if there are any), 'none'. Raises PlanError for one that is not there."""
    chosen: list[TorchDevice] = []
    for text in names:
        match = re.fullmatch(_NAME, text)
        if text.lower() in ("auto", "none"):
            chosen += accelerators_here()[0] if text.lower() == "auto" else []
            continue
        if match is None:
            raise PlanError(f"--device {text!r:.40} is none of cuda, cuda:1, xpu, mps, cpu (torch on the CPU), auto and none")
        found, kind, number = find_devices(), match[1].lower(), match[2]
        if kind in ("cpu", "torch"):
            count, memory = sum(each.torch_name == "cpu" for each in chosen), free_bytes()
            chosen.append(TorchDevice(f"TORCH{count}", "cpu", memory, memory))
            continue
        named = [
            each for each in found if each.torch_name == f"{kind}:{number}" or (not number and each.torch_name.startswith(kind))
        ]
        if not named:
            there = ", ".join(each.torch_name for each in found) or "none"
            raise PlanError(f"--device {text} does not exist here; torch finds {there}, and cpu always exists")
        chosen += named
    names_of = [each.name for each in chosen]
    if len(set(names_of)) < len(names_of):
        raise PlanError(f"--device {','.join(names)} names a device twice")
    return chosen
