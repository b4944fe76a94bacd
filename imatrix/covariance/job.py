"""Collecting covariances into a file: in one pass over the text, or in several where memory is short; resumable."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ...data_classes import dataclass
from ...errors import PlanError
from ...quantize.covariance.matrix.triangles import FoldedCovariance
from ...quantize.covariance.row_blocks import ROWS
from ...runtime import Model
from ...runtime.evaluate.score_statistics import ScoreStatistics
from ..calibration import Calibration
from ..windows import is_due, observe_windows, score_observed
from .collector import CovarianceCollector
from .estimate import expected_seconds
from .files import Origin
from .gradient_collector import GradientCollector
from .gradient_run import GradientRun
from .inputs import Input, covariance_inputs, reads_head
from .outputs import covariance_outputs, outputs_of
from .products import BLOCK
from .state import CollectionProgress, load_progress, restore_sums, save_state
from .writer import CovarianceWriter, planned

_SAVING_SHARE = 20  # a state is written when this many times the time has passed that writing the last one took
BITS = {16: "i16", 32: "f32"}  # of a number in the file -> its type


@dataclass(frozen=True)
class CovarianceOptions:
    """What is collected, and how.

    experts  the down matrices of experts too, each with a covariance of its own
    bits     of a number in the file: 16 (correlations) or 32
    memory   bytes that sums may take; what does not fit is left for another pass over the text
    curvature  how second moments of gradients at outputs are collected too; None: they are not
    """

    experts: bool = False
    bits: int = 16
    memory: int = 8 << 30
    curvature: CurvatureOptions | None = None


@dataclass(frozen=True)
class CurvatureOptions:
    """Second moments of gradients at outputs, collected into the same file. rows: at most, of a block that has its own; seed:
    of the labels, which are drawn from the model's predictions."""

    rows: int = ROWS
    seed: int = 0


def observed_inputs(model: Model, experts: bool, curvature: CurvatureOptions | None) -> list[Input]:
    """All whose second moments are collected: the inputs of a model's matrices, of experts' down matrices if that is asked for
    or with `curvature`, which has the outputs of all matrices behind them."""
    outputs = covariance_outputs(model.graph, curvature.rows) if curvature is not None else []
    return [*covariance_inputs(model.graph, experts or curvature is not None), *outputs]


class CovarianceJob:
    """One collection: `collector` is the observer of the pass that runs.

    inputs     those that are collected
    finished   names of those that the file has
    passes     the others, in the order in which passes sum them
    number     of the pass that runs, counted from 0
    is_beside  whether that pass is run together with the importance matrix; the others run by themselves
    """

    def __init__(self, model: Model, calibration: Calibration, path: Path, options: CovarianceOptions):
        self.model, self.calibration, self.path = model, calibration, path
        self.inputs = observed_inputs(model, options.experts, options.curvature)
        if not self.inputs:
            raise PlanError(f"{model.source.path}: it has no matrix whose inputs could be collected (--covariance)")
        self._memory, self.finished, self.curvature = options.memory, list[str](), options.curvature
        if options.curvature is not None:
            self.gradients = GradientRun(model, calibration, options.memory, options.curvature.seed)
        self.passes = self._split(self.inputs)
        text = model.metadata
        chunks, datasets = calibration.weighted_count(len(calibration.windows)), tuple(calibration.datasets)
        names = str(text.get("general.architecture", "")), str(text.get("general.name", ""))
        self.writer = CovarianceWriter(
            path, list(map(planned, self.inputs)), Origin(*names, datasets, chunks, calibration.n_ctx), BITS[options.bits]
        )
        names = [one.name for one in self.inputs]
        more = () if options.curvature is None else (options.curvature, self.gradients.gradients.identity)
        self.fingerprint = calibration.fingerprint(model, "covariance", names, options.bits, *more)
        self.number, self.windows, self.is_beside = 0, 0, True
        self._collector: CovarianceCollector | None = None
        self._saved_at, self._saving_seconds = time.monotonic(), 0.0

    @property
    def collector(self) -> CovarianceCollector:
        """The collector of the pass that runs; its sums take memory from the first use on."""
        if self._collector is None:
            group = self.passes[self.number]
            kind = GradientCollector if outputs_of(group) else CovarianceCollector
            self._collector = kind(group, self.model.workers)  # type: ignore[arg-type]
        return self._collector

    @property
    def state_path(self) -> Path:
        """The sums that an interrupted run had."""
        return state_path(self.path)

    @property
    def window_count(self) -> int:
        """Windows of a pass."""
        return len(self.calibration.windows)

    @property
    def is_last(self) -> bool:
        """Whether no pass over the text follows."""
        return self.number == len(self.passes) - 1

    @property
    def sums_bytes(self) -> int:
        """What the sums of the largest pass take in memory, and in the state of an interrupted one."""
        return max(sum(one.sums_bytes for one in group) for group in self.passes)

    def summing_bytes(self, *, gradients: bool) -> int:
        """What the largest pass over inputs, or over gradients, takes in memory while it sums, with rows that wait; 0: none."""
        n_ctx = self.calibration.n_ctx
        passes = (group for group in self.passes if bool(outputs_of(group)) == gradients)
        return max((sum(summing_bytes(one, n_ctx) for one in group) for group in passes), default=0)

    def expected_seconds(self) -> tuple[float, float, float]:
        """(seconds of running the text through the model in all passes, seconds of the sums, seconds that threads wait in all
        of that, added up), roughly."""
        back = self.gradient_passes
        of_text = self.calibration.windows.size, self.calibration.n_ctx
        running, sums = expected_seconds(self.model, self.inputs, *of_text, len(self.passes) - back)
        gradients, idle = self.gradients.expected_seconds(back) if back else (0.0, 0.0)
        return running + gradients, sums, idle

    def pass_seconds(self) -> list[float]:
        """What each pass that is left takes, roughly."""

        def seconds(group: Sequence[Input]) -> float:
            running, sums = expected_seconds(self.model, group, self.calibration.windows.size, self.calibration.n_ctx, 1)
            return sums + (self.gradients.expected_seconds(1)[0] if outputs_of(group) else running)

        return [seconds(group) for group in self.passes]

    @property
    def gradient_passes(self) -> int:
        """Passes, of those that are left, over gradients."""
        return sum(bool(outputs_of(group)) for group in self.passes)

    def _split(self, inputs: Sequence[Input]) -> list[list[Input]]:
        """The passes over inputs, and behind them those over outputs."""
        outputs = outputs_of(inputs)
        own = [one for one in inputs if one not in outputs]
        passes = split_into_passes(own, self._memory, self.calibration.n_ctx)
        return passes + (split_into_passes(outputs, self.gradients.sums_memory, self.calibration.n_ctx) if outputs else [])

    def resume(self, windows: int) -> None:
        """Goes on after an interruption. windows: those that the importance matrix has already.

        Raises PlanError for the state of another job, or of other windows.
        """
        found = self._load_progress(windows)
        if found is None:
            raise PlanError(
                f"{self.state_path}: the covariance of the {windows} windows that the interrupted run had does not exist; "
                "--force starts over"
            )
        path, progress = found
        self._leave_out(progress.finished)
        if progress.current:  # these have sums: they stay together, whatever the memory is now
            current = [one for one in self.inputs if one.name in progress.current]
            others = [one for group in self.passes for one in group if one not in current]
            self.passes = [current, *self._split(others)]
            self.windows = progress.windows
            restore_sums(path, self.collector)
        self.is_beside = bool(progress.current) and not progress.finished
        if path != self.state_path:
            path.replace(self.state_path)

    def resume_finished(self) -> None:
        """Continues with what the file has already; sums of other inputs start over. Raises PlanError as `resume` does."""
        found = self._load_progress(None)
        if found is not None:
            self._leave_out(found[1].finished)

    def _load_progress(self, windows: int | None) -> tuple[Path, CollectionProgress] | None:
        """The file of the last state with `windows` windows of the importance matrix (None: any), and what it says."""
        for path in (_next(self.state_path), self.state_path):
            if not path.exists():
                continue
            progress = load_progress(path)
            progress.check(self.fingerprint)
            if windows is None or progress.finished or not progress.current or progress.windows == windows:
                return path, progress
        return None

    def _leave_out(self, finished: Sequence[str]) -> None:
        """These inputs are in the unfinished file. Raises PlanError if that is gone."""
        if finished and not self.writer.reopen():
            raise PlanError(f"{self.writer.part}, which has what was collected, is gone; --force starts over")
        self.finished = list(finished)
        others = [one for one in self.inputs if one.name not in finished]
        self.passes = self._split(others)

    def start_afresh(self) -> None:
        """Removes what an interrupted run left."""
        for path in (self.state_path, _next(self.state_path), self.writer.part):
            path.unlink(missing_ok=True)

    def is_due(self) -> bool:
        """Whether enough time has passed since the last state for another one to cost next to nothing."""
        return time.monotonic() - self._saved_at >= _SAVING_SHARE * self._saving_seconds

    def prepare_state(self, windows: int) -> None:
        """Writes the state after `windows` windows, next to the last one, which stays valid until `commit_state`."""
        begun = time.monotonic()
        current = [one.name for one in self.passes[self.number]] if windows else []
        progress = CollectionProgress(self.fingerprint, self.finished, current, windows)
        save_state(_next(self.state_path), progress, self.collector if windows else None)
        self._saved_at = time.monotonic()
        self._saving_seconds = self._saved_at - begun

    def commit_state(self) -> None:
        """The prepared state takes the place of the last one."""
        _next(self.state_path).replace(self.state_path)

    def end_pass(self, on_part: Callable[[str], None] = lambda name: None) -> None:
        """Writes what the pass collected to the file, and begins the next pass, if there is one. on_part: called with the name
        of each part before it is written."""
        self.writer.begin()

        def write(name: str, matrix: int, covariance: FoldedCovariance) -> None:
            on_part(name)
            self.writer.write(name, matrix, covariance)

        self.collector.each_part(write, self.writer.dtype)
        if self.is_last:
            return
        ended = self.passes[self.number]
        self.number, self.windows, self.is_beside, self._collector = self.number + 1, 0, False, None
        self.record_finished([one.name for one in ended])

    def record_finished(self, names: Sequence[str]) -> None:
        """The parts of these inputs are written: they are brought to the disk, and the state says that they are there."""
        self.writer.sync()
        self.finished += names
        self.prepare_state(0)
        self.commit_state()

    def run_pass(self, state_frequency: int, on_window: Callable[[float], None]) -> None:
        """A pass by itself: only the covariances are collected, and predictions are scored only if some are of the output.

        state_frequency: windows between states, 0: none; on_window: called with the windows that are done, of
        gradients also with fractions. Raises MillError.
        """
        windows, model = self.calibration.windows, self.model
        if isinstance(self.collector, GradientCollector):
            self._run_gradients(self.collector, state_frequency, on_window)
            return
        with model.observing(self.collector):
            for batch in self.calibration.batches(model):
                if batch.stop <= self.windows:
                    continue
                self.collector.weight = int(self.calibration.weights[batch.start])
                if reads_head(self.passes[self.number]):
                    list(score_observed(model, windows[batch], batch.start, ScoreStatistics()))
                else:
                    observe_windows(model, windows[batch], batch.start)
                before, self.windows = self.windows, batch.stop
                on_window(self.windows)
                if is_due(state_frequency, before, self.windows) and self.windows < len(windows) and self.is_due():
                    self.prepare_state(self.windows)
                    self.commit_state()

    def _run_gradients(self, collector: GradientCollector, state_frequency: int, on_window: Callable[[float], None]) -> None:
        for batch in self.gradients.batches(self.windows):
            self.gradients.run(batch, collector, lambda share, batch=batch: on_window(batch.start + share * len(batch)))
            self.windows = batch.stop
            on_window(self.windows)
            if state_frequency and self.windows < self.window_count and self.is_due():
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
        needed = _needed_bytes(one, memory, n_ctx)
        if not passes or used + needed > memory:
            passes.append([])
            used = 0
        passes[-1].append(one)
        used += needed
    return passes


def split_among(inputs: Sequence[Input], workers: int, memory: int, n_ctx: int) -> list[list[Input]]:
    """The inputs in groups that take about equally long to sum, for so many workers, whose sums fit into so many bytes each.

    There are a multiple of `workers` groups, as far as there are inputs. Raises PlanError as `split_into_passes` does.
    """
    needed = {one.name: _needed_bytes(one, memory, n_ctx) for one in inputs}
    count = 0
    while True:
        count += workers
        groups: list[list[Input]] = [[] for _ in range(min(count, len(inputs)))]
        loads = [0] * len(groups)
        for one in sorted(inputs, key=lambda one: -needed[one.name]):
            least = loads.index(min(loads))
            groups[least].append(one)
            loads[least] += needed[one.name]
        if max(loads, default=0) <= memory:
            return groups


def summing_bytes(one: Input, n_ctx: int) -> int:
    """What the sums of an input take while they are made, with rows that wait for the rest of their block."""
    waits = one.is_stack_of_experts or n_ctx % BLOCK != 0 or one.layer is None
    return one.sums_bytes + (one.waiting_bytes if waits else 0)


def _needed_bytes(one: Input, memory: int, n_ctx: int) -> int:
    """What the sums of an input take while they are made. Raises PlanError if that is more than `memory`."""
    needed = summing_bytes(one, n_ctx)
    if needed > memory:
        raise PlanError(
            f"the covariance of {one.name} ({one.matrices} x {one.columns} columns) takes {needed:,} bytes while it is "
            f"summed, more than the {memory:,} of --memory"
        )
    return needed


def state_path(path: Path) -> Path:
    """Where the sums of an interrupted collection into a file are."""
    return path.with_name(path.name + ".state")


def _next(path: Path) -> Path:
    return path.with_name(path.name + ".new")
