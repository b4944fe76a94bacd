"""Kernels that begin while the one before still runs (programmatic dependent launches, on NVIDIA's GPUs from sm_90 on), and
then wait for its end and for all that it wrote.

Every kernel waits before it reads or writes anything that others write or read, so that the end of one means the end of all
before it.
"""

# pyright: basic, reportArgumentType=false, reportCallIssue=false, reportAttributeAccessIssue=false

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl

from .bytes4 import IS_INTERPRETED

_LEAST = 9, 0  # capability of a device


@cache
def launched(device: torch.device) -> dict[str, Any]:
    """Arguments of launches: the constant DEPENDENT, whether the kernel may begin early, and Triton's option."""
    is_able = device.type == "cuda" and torch.version.hip is None and not IS_INTERPRETED
    if is_able and torch.cuda.get_device_capability(device) >= _LEAST:
        return {"DEPENDENT": True, "launch_pdl": True}
    return {"DEPENDENT": False}


@triton.jit
def let_next_begin(DEPENDENT: tl.constexpr):
    """Lets the next kernel begin."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Waits for the kernels before."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def begin(DEPENDENT: tl.constexpr):
    """Lets the next kernel begin, and waits for those before."""
    let_next_begin(DEPENDENT)
    wait(DEPENDENT)
