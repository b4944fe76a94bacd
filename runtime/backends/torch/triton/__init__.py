"""Kernels in Triton that decode packed weights while they multiply, for the devices that Triton serves."""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from .block_format import block_format

if TYPE_CHECKING:
    from .launch import PackedProducts

_DEVICES = ("cuda",)  # torch's name of NVIDIA's GPUs and of AMD's


@cache
def kernels_of(type_name: str, device: torch.device) -> PackedProducts | None:
    """The products of a tensor type on a device; None where torch's own operations have to do: on other devices, without the
    package triton, for types whose blocks the kernels do not read."""
    if device.type not in _DEVICES or find_spec("triton") is None or block_format(type_name) is None:
        return None
    from .launch import PackedProducts

    return PackedProducts(type_name, device)
