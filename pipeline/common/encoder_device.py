"""The device that encodes, or computes gradients, by the names that the verbs which run a model know."""

from __future__ import annotations

from itertools import pairwise

from ...formats import TYPES
from ...jobs.plan import Plan
from ...quantize.torch_encoders.coupled_on_device import COUPLED_BYTES, couples_on_device
from ...runtime.placement.torch_devices import accelerators_here, choose_devices
from .figures import size_text
from .messages import note, warn


def encoder_device(names: str | None) -> str | None:
    """What torch calls the device of `quantize --device`; None: this program's own encoders. The first of several encodes.

    names: as `choose_devices` takes them, with commas between: 'cuda', 'cuda:1', 'cpu' (torch on the processor), 'auto'.
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
    if chosen[0].torch_name == "cpu":
        warn([f"--device {names} is torch on the processor, slower than this program's own solvers (--device none)"])
    return chosen[0].torch_name


def describe_coupled_rows(plan: Plan, device: str | None) -> None:
    """Says what a device needs for rows that are encoded together, and which types of these the processor encodes."""
    if device is None:
        return
    largest, left = 0, set[str]()
    for output in plan.outputs:
        if not output.cuts:  # where runs of such rows begin
            continue
        name, columns = TYPES.plain(output.type).name, output.shape[0]
        if not couples_on_device(name):
            left.add(name)
            continue
        rows = max(stop - start for start, stop in pairwise([*output.cuts, output.shape[1]]))
        largest = max(
            largest, 8 * columns**2 + COUPLED_BYTES * rows * columns + 8 * rows**2
        )  # H and its factor; A and products of both
    if largest:
        note(f"rows that are encoded together take up to {size_text(largest)} of {device}'s memory")
    if left:
        note(f"rows that are encoded together as {', '.join(sorted(left))} stay with the processor")


def computing_device(names: str | None) -> str:
    """What torch calls the device that computes gradients, for `tune --device`: 'cpu' where none is asked for, or found. The
    first of several. Raises as `encoder_device`."""
    chosen = choose_devices(names.split(",")) if names is not None else []
    if names is not None and not chosen and "auto" in names.lower():
        note(f"--device {names}: {accelerators_here()[1]}, the processor computes")
    return chosen[0].torch_name if chosen else "cpu"
