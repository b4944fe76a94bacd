"""Kernels in Triton that decode packed weights while they multiply, for the devices that Triton serves."""

from __future__ import annotations

import warnings
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch

from .block_format import block_format

if TYPE_CHECKING:
    from .launch import PackedProducts

MOST_TOGETHER = 3  # matrices that one kernel multiplies with the same vectors
_DEVICES = ("cuda",)  # torch's name of NVIDIA's GPUs and of AMD's


@cache
def kernels_of(type_name: str, device: torch.device) -> PackedProducts | None:
    """The products of a tensor type on a device; None where torch's own operations have to do: on other devices, without the
    package triton, where its kernels cannot be built (it needs a C compiler), for types whose blocks kernels do not read."""
    if device.type not in _DEVICES or block_format(type_name) is None or not _served(device):
        return None
    from .launch import PackedProducts

    return PackedProducts(type_name, device)


@cache
def row_kernels(device: torch.device) -> Any:
    """The module of operations on rows, or None, as of `kernels_of`."""
    return import_module(".rows", __package__) if device.type in _DEVICES and _served(device) else None


@cache
def attention_kernels(device: torch.device) -> Any:
    """The module of attention, or None, as of `kernels_of`."""
    return import_module(".attention", __package__) if device.type in _DEVICES and _served(device) else None


@cache
def _served(device: torch.device) -> bool:
    """Whether kernels can be built for the device and give what they should: four rows of ones times a vector of ones."""
    if find_spec("triton") is None:
        return False
    try:
        from .launch import PackedProducts

        ones, first = torch.ones((1, 32), device=device), torch.zeros(1, dtype=torch.int64, device=device)
        problem = ""
        for name, codes in (("q8_0", [1] * 32), ("iq4_nl", [0x88] * 16)):  # which stand for 1; values computed, and by table
            block = torch.tensor([0, 60, *codes], dtype=torch.uint8, device=device)  # a scale of 1
            product = PackedProducts(name, device).matvec(block.repeat(4), ones, first, 4)
            problem = problem or ("" if bool((product == 32).all()) else f"a product is {product.tolist()}")
        from .rows import as_bytes

        products = PackedProducts("q8_0", device)
        block = torch.tensor([0, 60, *[1] * 32], dtype=torch.uint8, device=device)
        if products.has_bytes:
            product = products.matvec_bytes(block.repeat(4), as_bytes(ones), first, 4, 32)
            close = bool(((product - 32).abs() < 0.01).all())
            problem = problem or ("" if close else f"a product of bytes is {product.tolist()}")
    except Exception as error:  # a compiler's or a driver's, of any kind: torch's operations do without both
        problem = _reason(error)
    if problem:
        warnings.warn(f"Triton's kernels are not used on {device}: {problem}", stacklevel=2)
    return not problem


def _reason(error: BaseException) -> str:
    """Where and why, in one line: the first and the last of the innermost error's, between which compilers print code."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^")]
    return " ".join(dict.fromkeys([*lines[:1], *lines[-1:]])) or type(error).__name__
