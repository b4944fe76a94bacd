"""Collecting covariances into a file: in one pass over the text, or in several where memory is short; resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ...errors import PlanError
from ...runtime import Model
from ..calibration import Calibration
from ..windows import is_due, run
from .collector import CovarianceCollector
from .estimate import expected_seconds
from .files import Origin
from .inputs import Input, covariance_inputs
from .products import BLOCK
from .state import Progress, load_progress, restore_sums, save_state
from .writer import CovarianceWriter, PlannedInput

_SAVING_SHARE = 20  # a state is written when so many times the time has passed that writing the last one took
BITS = {16: "i16", 32: "f32"}  # of a number in the file -> its type


@dataclass(frozen=True)
class CovarianceOptions:
    """What is collected, and how.

    experts  the down matrices of experts too, each with a covariance of its own
    bits     of a number in the file: 16 (correlations) or 32
    memory   bytes that sums may take; what does not fit is left for another pass over the text
    """

    experts: bool = False
    bits: int = 16
    memory: int = 8 << 30


class CovarianceJob:
    """One collection: `collector` is the observer of the pass that runs.

    inputs  those that are collected; passes: the same, in the order in which passes sum them
    number  of the pass that runs, counted from 0
    """

    def __init__(self, model: Model, calibration: Calibration, path: Path, options: CovarianceOptions):
        self._model, self._calibration, self.path = model, calibration, path
        self.inputs = covariance_inputs(model.graph, options.experts)
        if not self.inputs:
            raise PlanError(f"{model.source.path}: it has no matrix whose inputs could be collected (--covariance)")
        self.passes = split_into_passes(self.inputs, options.memory, calibration.n_ctx)
        text = model.metadata
        chunks, datasets = calibration.weighted_count(len(calibration.windows)), tuple(calibration.datasets)
        names = str(text.get("general.architecture", "")), str(text.get("general.name", ""))
        planned = [PlannedInput(one.tensors, one.columns, one.matrices) for one in self.inputs]
        self.writer = CovarianceWriter(path, planned, Origin(*names, datasets, chunks, calibration.n_ctx), BITS[options.bits])
        order = [[one.name for one in group] for group in self.passes]
        self.fingerprint = calibration.fingerprint(model, "covariance", order, options.bits)
        self.number, self.windows = 0, 0
        self.collector = CovarianceCollector(self.passes[0], model.workers)
        self._saved_at, self._saving_seconds = time.monotonic(), 0.0

    @property
    def state_path(self) -> Path:
        """The sums that an interrupted run had."""
        return state_path(self.path)

    @property
    def window_count(self) -> int:
        """Windows of a pass."""
        return len(self._calibration.windows)

    @property
    def is_last(self) -> bool:
        return self.number == len(self.passes) - 1

    @property
    def sums_bytes(self) -> int:
        """What the largest pass takes in memory."""
        return max(sum(one.sums_bytes for one in group) for group in self.passes)

    def expected_seconds(self) -> tuple[float, float]:
        """(seconds of running the text through the model in all passes, seconds of the sums), roughly."""
        return expected_seconds(self._model, self.inputs, self._calibration.windows.size, len(self.passes))

    def resume(self, windows: int) -> None:
        """Goes on after an interruption. windows: those that the importance matrix has already.

        Raises PlanError for the state of another job, or of other windows.
        """
        candidates = [path for path in (_next(self.state_path), self.state_path) if path.exists()]
        for path in candidates:
            progress = load_progress(path)
            progress.check(self.fingerprint)
            if progress.number or progress.windows == windows:
                break
        else:
            raise PlanError(
                f"{self.state_path}: the covariance of the {windows} windows that the interrupted run had is not there; "
                "--force starts afresh"
            )
        if progress.number and not self.writer.reopen():
            raise PlanError(f"{self.writer.part}, which has what earlier passes collected, is gone; --force starts afresh")
        self.number, self.windows = progress.number, progress.windows
        self.collector = CovarianceCollector(self.passes[self.number], self._model.workers)
        restore_sums(path, self.collector)
        if path != self.state_path:
            path.replace(self.state_path)

    def start_afresh(self) -> None:
        """Removes what an interrupted run left."""
        for path in (self.state_path, _next(self.state_path), self.writer.part):
            path.unlink(missing_ok=True)

    def is_due(self) -> bool:
        """Whether enough time has passed since the last state for another one to cost next to nothing."""
        return time.monotonic() - self._saved_at >= _SAVING_SHARE * self._saving_seconds

    def prepare_state(self, windows: int) -> None:
        """Writes the state after so many windows, beside the last one, which stays valid until `commit_state`."""
        begun = time.monotonic()
        save_state(_next(self.state_path), Progress(self.fingerprint, self.number, windows), self.collector)
        self._saved_at = time.monotonic()
        self._saving_seconds = self._saved_at - begun

    def commit_state(self) -> None:
        """The prepared state takes the place of the last one."""
        _next(self.state_path).replace(self.state_path)

    def end_pass(self) -> None:
        """Writes what the pass collected to the file, and begins the next pass, if there is one."""
        self.writer.begin()
        self.collector.each_part(self.writer.write)
        if self.is_last:
            return
        self.writer.sync()
        self.number, self.windows = self.number + 1, 0
        self.collector = CovarianceCollector(self.passes[self.number], self._model.workers)
        self.prepare_state(0)
        self.commit_state()

    def run_pass(self, state_frequency: int, on_window: Callable[[int], None]) -> None:
        """A pass after the first: only the covariances are collected, and predictions are not scored.

        state_frequency: windows between states, 0: none; on_window: called with the windows that are done. Raises MillError.
        """
        windows, model = self._calibration.windows, self._model
        with model.observing(self.collector):
            for batch in self._calibration.batches(model):
                if batch.stop <= self.windows:
                    continue
                self.collector.weight = int(self._calibration.weights[batch.start])
                run(model, windows[batch], batch.start)
                before, self.windows = self.windows, batch.stop
                on_window(self.windows)
                if is_due(state_frequency, before, self.windows) and self.windows < len(windows) and self.is_due():
                    self.prepare_state(self.windows)
                    self.commit_state()

    def finish(self) -> None:
        """Gives the file its name, and removes the state."""
        self.writer.finish()
        for path in (self.state_path, _next(self.state_path)):
            path.unlink(missing_ok=True)


def split_into_passes(inputs: Sequence[Input], memory: int, n_ctx: int) -> list[list[Input]]:
    """The inputs in groups, in order, whose sums fit into so many bytes. Raises PlanError for one that alone does not."""
    passes: list[list[Input]] = []
    used = 0
    for one in inputs:
        waits = one.is_stack_of_experts or n_ctx % BLOCK != 0 or one.layer is None
        needed = one.sums_bytes + (one.waiting_bytes if waits else 0)
        if needed > memory:
            raise PlanError(
                f"the covariance of {one.name} ({one.matrices} x {one.columns} columns) takes {needed:,} bytes while it is "
                f"summed, more than the {memory:,} of --memory"
            )
        if not passes or used + needed > memory:
            passes.append([])
            used = 0
        passes[-1].append(one)
        used += needed
    return passes


def state_path(path: Path) -> Path:
    """Where the sums of an interrupted collection into a file are."""
    return path.with_name(path.name + ".state")


def _next(path: Path) -> Path:
    return path.with_name(path.name + ".new")
