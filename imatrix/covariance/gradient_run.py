"""The passes of a collection over gradients: which windows are computed at a time, and what they take of memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import TYPE_CHECKING

from ...runtime import Model
from ...runtime.output_gradients import GroupCost, gradients_of, group_cost
from ...runtime.timing import products
from ..calibration import Calibration
from ..windows import naming_causes
from .gradient_collector import GradientCollector

if TYPE_CHECKING:
    from ...runtime.backends.torch.gradients import Gradients

_GROUPS, _GROUPS_PER_THREAD = 16, 2  # windows that are computed at a time: at most so many groups of them
_FORTH_AND_BACK = 3  # products of each matrix: forward twice, and backward
_HEAD_PRODUCTS = 2  # of the output matrix: forward once
_UNEVEN = 1.1  # times what products of large square matrices take, those of weights do
WRITING = 12  # products of float32 in whose time an op writes a byte: 5 in a cache, 22 where the memory is new (Zen 5)
_DECODING = 20  # products of float32 in whose time a weight is decoded, at most, which each group does
_VALUES_SHARE = 4  # of the memory, at most, for what is kept of windows between parts of the model: one in so many
_WORKING_SHARE = 4  # the same of what threads work with, of which there is one at least


def gradient_work(gradients: Gradients, cost: GroupCost, count: int, n_ctx: int) -> tuple[float, float]:
    """Multiplications of the layers and of the head, roughly, in whose time gradients of so many windows of n_ctx tokens are
    computed: decoding weights, and what ops do beside products, are counted as such. cost: of a group."""
    groups, tokens, every = ceil(count / gradients.windows_of_group(n_ctx)), count * n_ctx, list(products(gradients.graph.ops))
    decoding = groups * _DECODING * sum(one.size * one.matrices for one in every)
    layers = _FORTH_AND_BACK * (_UNEVEN * tokens * sum(one.per_token for one in every) + decoding)
    layers += groups * (cost.products + WRITING * cost.written)
    return layers, _HEAD_PRODUCTS * _UNEVEN * tokens * sum(op.multiplied for op in gradients.graph.head)


class GradientRun:
    """Runs windows forth and back for the gradients at the outputs of a model's matrices.

    windows_at_once  windows whose values are kept at the same time
    kept_bytes       that these take
    working_bytes    what all threads that have windows need beside that and sums; there are no more threads than fit
    sums_memory      what is left of the memory for sums

    Raises PlanError without torch, and for a model whose predictions have no gradients.
    """

    def __init__(self, model: Model, calibration: Calibration, memory: int, seed: int):
        self._model, self._calibration, self._seed = model, calibration, seed
        self.gradients, n_ctx = gradients_of(model), calibration.n_ctx
        self._group = self.gradients.windows_of_group(n_ctx)
        group_bytes = self._group * n_ctx * self.gradients.kept_bytes
        most = max(_GROUPS, _GROUPS_PER_THREAD * self.gradients.threads)
        groups = min(most, max(1, memory // _VALUES_SHARE // group_bytes), -(-len(calibration.windows) // self._group))
        self.windows_at_once, self.kept_bytes = groups * self._group, groups * group_bytes
        self._cost = own = bound_threads(self.gradients, len(calibration.windows), n_ctx, memory)
        self.working_bytes = own.of(self.gradients.threads, groups)
        self.sums_memory = max(memory - self.kept_bytes - self.working_bytes, memory // 2)

    def expected_seconds(self, passes: int) -> tuple[float, float]:
        """What so many passes take, without sums, and how long the model's threads wait meanwhile, all together: a rough
        estimate from the number of multiplications and of bytes that ops write. A thread computes a group of windows at a time:
        those that have none wait, but for the head, of which all compute some tokens."""
        windows = self._calibration.windows
        groups = ceil(len(windows) / self._group)
        layers, head = gradient_work(self.gradients, self._cost, *windows.shape)
        run, most = self.gradients, windows.size
        one, some, all_threads = (run.products_per_second(pieces) for pieces in (1, groups, most))
        seconds, work = (passes * each for each in (layers / some + head / all_threads, (layers + head) / one))
        return seconds, max(0.0, self._model.workers.count * seconds - work)

    def batches(self, first: int) -> Iterator[range]:
        """Numbers of consecutive windows of one weight that are computed together, from window `first` on, where a batch ended
        before. Batches are whole groups, so that these are the same whatever the memory is."""
        weights = self._calibration.weights
        while first < len(weights):
            same = 1
            while same < self.windows_at_once and first + same < len(weights) and weights[first + same] == weights[first]:
                same += 1
            yield range(first, first + same)
            first += same

    def run(self, batch: range, collector: GradientCollector, on_share: Callable[[float], None]) -> None:
        """Adds the gradients of a batch to the sums. on_share: called with the share of it that is done. Raises MillError."""
        collector.weight = int(self._calibration.weights[batch.start])
        windows = self._calibration.windows[batch.start : batch.stop]
        self._model.files.check()
        with naming_causes(self._model, windows, batch.start):
            self.gradients.run(windows, self._seed, collector.wanted, collector.on_gradient, on_share)


def bound_threads(gradients: Gradients, count: int, n_ctx: int, memory: int) -> GroupCost:
    """Has no more threads compute gradients of so many windows than fit into their share of so many bytes, but one at least;
    returns what each takes."""
    each = group_cost(gradients, count, n_ctx)
    gradients.threads = min(gradients.threads, each.threads_in(memory // _WORKING_SHARE))
    return each
