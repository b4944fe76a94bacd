"""The options that say on which devices a model runs, and what of it lies where; `plan` has those that need no device too."""

from __future__ import annotations

from typing import Any

import click

from . import flags
from .types import SIZE, Listed

_SHARES = Listed(float, "a number")
_NAMES = Listed(str, "a device")

# The keyword that click gives the command -> the field of Settings.
FIELDS = {
    "device": "device",
    "n_gpu_layers": "gpu_layers",
    "override_tensor": "override_tensor",
    "cpu_moe": "cpu_moe",
    "n_cpu_moe": "n_cpu_moe",
    "tensor_split": "tensor_split",
    "main_gpu": "main_gpu",
    "device_memory": "device_memory",
}

rules = flags.together(
    click.option(
        "-ngl",
        "--n-gpu-layers",
        "--gpu-layers",
        type=click.IntRange(0),
        help="Layers on devices, the last ones. [default: all]",
    ),
    click.option(
        "-ot", "--override-tensor", multiple=True, metavar="REGEX=DEVICE,...", help="CPU, CUDA0, ...; the first match wins."
    ),
    click.option("--cpu-moe", is_flag=True, help="Experts stay in RAM."),
    click.option("--n-cpu-moe", type=click.IntRange(0), help="The experts of the first N layers stay in RAM."),
    click.option(
        "-ts",
        "--tensor-split",
        type=_SHARES,
        metavar="N,N,...",
        help="Shares of the devices in the layers. [default: by memory]",
    ),
)
device = click.option(
    "-dev",
    "--device",
    type=_NAMES,
    metavar="NAME,...",
    help="Devices of torch: cuda (all), cuda:1, xpu, mps, cpu, auto; or none. [default: none; auto with -ngl, -ot, ...]",
)
_devices = flags.together(
    device,
    rules,
    click.option("-mg", "--main-gpu", type=click.IntRange(0), help="Use this one of the devices alone."),
    click.option(
        "--device-memory",
        type=SIZE,
        metavar="SIZE",
        help="Weights take at most this much of each device; others are copied there layer by layer, as they are used.",
    ),
)


def settings_of(values: dict[str, Any]) -> dict[str, Any]:
    """The settings of `load_model` among the keywords of these options: those that were given."""
    return {field: values[name] for name, field in FIELDS.items() if values[name] not in (None, (), False)}


OPTIONS = [_devices]
placement = flags.gathered(OPTIONS, list(FIELDS), "placement", settings_of)
