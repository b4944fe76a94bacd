"""Gradients at the outputs of a loaded model's matrices."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..data_classes import dataclass
from ..operating_system.memory import free_bytes
from .placement.torch_devices import import_torch

_COPIED_BYTES, _COPIED_SHARE = 4 << 30, 4  # of weights that are no mapped file: as many, or one in so many of those free

if TYPE_CHECKING:
    from .backends.torch.gradients import Gradients
    from .model import Model


def gradients_of(model: Model, is_whole: bool = False) -> Gradients:
    """What computes the gradients of a model: with torch on the first of the devices that it was placed on, else on the
    processor, with the model's threads. is_whole: see `Gradients`.

    Weights are those of the file, whatever was interleaved when it was loaded; bytes that are on devices already serve. Raises
    PlanError without torch, for a model that predicts no tokens, and for an op that has no derivative.
    """
    import_torch("--curvature")
    from .backends.torch.executable import TorchExecutable
    from .backends.torch.gradients import Gradients
    from .backends.torch.weights import Weights

    if model.placed is not None and isinstance(model.executable, TorchExecutable):
        device, *_ = model.placed.devices.values()
        weights, where = model.executable.weights.exactly(), device.torch_name
    else:
        weights, where = Weights(model.stored, {}, exact=True), "cpu"
    free = free_bytes()
    copied = _COPIED_BYTES if free is None else free // _COPIED_SHARE
    return Gradients(model.graph, weights, where, model.workers.count, is_whole, copied)


@dataclass(frozen=True)
class GroupCost:
    """What a group of windows takes while gradients are computed.

    part, head, handed_over  bytes that a thread, or a device, needs beside what is kept between parts of the model: for a part;
                             for some rows of the head; and of the gradients that it hands over after either
    products, written        beside the products of weights, in all parts, forth, again and back: multiplications, of attention,
                             and bytes that ops write
    """

    part: int
    head: int
    handed_over: int
    products: int
    written: int

    def of(self, threads: int, groups: int) -> int:
        """Bytes of so many threads with so many groups of windows; what one more of them hands over is summed meanwhile."""
        parts = min(threads, groups) * self.part + (self.handed_over if groups > threads else 0)
        return max(parts, threads * self.head)

    def threads_in(self, nbytes: int) -> int:
        """As many threads as fit, but one at least."""
        return max(1, (nbytes - self.handed_over) // max(self.part, self.head))


def group_cost(gradients: Gradients, count: int, n_ctx: int) -> GroupCost:
    """Of windows of n_ctx tokens, of which there are `count` in all: counted, without computing anything."""
    from .backends.torch.gradient_cost import count_cost

    return GroupCost(*count_cost(gradients, count, n_ctx))
