"""The device that encodes, or computes gradients, by the names that the verbs which run a model know."""

from __future__ import annotations

from ...jobs.plan import Plan
from ...quantize.plain_rows import is_gpu
from ...runtime.placement.torch_devices import accelerators_here, choose_devices
from .messages import note, warn


def encoder_device(names: str | None) -> str | None:
    """What torch calls the device of `quantize --device`; None: this program's own encoders. The first of several encodes.

    names: as `choose_devices` takes them, with commas between: 'cuda', 'cuda:1', 'cpu', 'auto'.
    Raises PlanError for a device that is not there.
    """
    if names is None:
        return None
    chosen = choose_devices(names.split(","))
    if not chosen:
        if "auto" in names.lower():
            warn([f"--device {names} without effect: {accelerators_here()[1]}, this program's own encoders are used"])
        return None
    if len(chosen) > 1:
        note(f"{chosen[0].torch_name} encodes; one device does at a time")
    if not is_gpu(chosen[0].torch_name):
        warn([f"--device {names} encodes nothing: of all devices GPUs of NVIDIA do; this program's own encoders are used"])
    return chosen[0].torch_name


def describe_coupled_rows(plan: Plan, device: str | None) -> None:
    """Says so where rows are encoded together, which no device does: the steps of one row wait for those of another."""
    if is_gpu(device) and any(output.cuts for output in plan.outputs):
        note(f"rows that are encoded together stay with the processor; {device} encodes the others")


def computing_device(names: str | None) -> str:
    """What torch calls the device that computes gradients, for `tune --device`: 'cpu' where none is asked for, or found. The
    first of several. Raises as `encoder_device`."""
    chosen = choose_devices(names.split(",")) if names is not None else []
    if names is not None and not chosen and "auto" in names.lower():
        note(f"--device {names}: {accelerators_here()[1]}, the processor computes")
    return chosen[0].torch_name if chosen else "cpu"
