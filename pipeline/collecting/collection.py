"""One collection of importance data, as a request says it: planned, run or resumed, and written."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from ...data_classes import dataclass
from ...errors import MillError
from ...imatrix import Imatrix
from ...imatrix.calibration import Calibration
from ...imatrix.collect import CollectOptions, RunBatches, collect, fingerprint_of
from ...imatrix.collect_state import CollectState, load_state, state_path
from ...imatrix.covariance.job import CovarianceJob, CurvatureOptions
from ...quantize.covariance.row_blocks import ROWS
from ...runtime import Model
from ...runtime.evaluate.perplexity import Perplexity
from ..cluster.covariance import SharedCovariance
from ..common.arguments import as_bytes
from ..common.messages import perplexity_text, warn
from ..common.progress import WINDOWS, OnProgress, Stage
from ..requests.imatrix import ImatrixRequest
from .moments import begin_covariance, finish_covariance, plan_covariance, time_shares

N_CTX, OUTPUT_FREQUENCY = 512, 10
Elsewhere = AbstractContextManager[RunBatches | SharedCovariance]  # see `cluster.windows.collecting_on`


def moments_path(request: ImatrixRequest) -> Path | None:
    """The file of second moments that a request names; None: none are collected."""
    path = request.covariance if request.curvature is None else request.curvature
    return Path(path) if path is not None else None


def options_of(request: ImatrixRequest) -> CollectOptions:
    """Which tensors a request collects from."""
    head_inputs = moments_path(request) is not None
    return CollectOptions(request.process_output, request.process_embedding, request.nextn, head_inputs)


def collection_of(request: ImatrixRequest, model: Model, windows: Calibration) -> Collection:
    """What a request collects from a model and windows, of which nothing is done. Raises PlanError as `plan_covariance`."""
    path, moments = Path(request.out) if request.out is not None else None, None
    if (moments_file := moments_path(request)) is not None:
        moments = plan_covariance(
            model,
            windows,
            moments_file,
            request.covariance_experts,
            request.covariance_bits,
            as_bytes(request.memory),
            on_cluster=request.cluster is not None,
            curvature=curvature_options(request),
        )
    frequency = OUTPUT_FREQUENCY if request.output_frequency is None else request.output_frequency
    return Collection(model, windows, options_of(request), path, moments, frequency, request.save_frequency or 0)


def curvature_options(request: ImatrixRequest) -> CurvatureOptions | None:
    """How second moments of gradients are collected; None: they are not."""
    return CurvatureOptions(request.curvature_rows or ROWS, request.curvature_seed or 0) if request.curvature else None


@dataclass(frozen=True)
class Collection:
    """Windows that run through a model, and what is collected from them.

    path             of the importance matrix; None: it is only returned
    moments          the job that collects second moments too
    state_frequency  windows between states in OUT.state, from which an interrupted collection is resumed; 0: none
    save_frequency   windows between unfinished importance matrices OUT.at_N; 0: none
    """

    model: Model
    windows: Calibration
    options: CollectOptions
    path: Path | None
    moments: CovarianceJob | None
    state_frequency: int
    save_frequency: int

    def interrupted(self) -> CollectState | None:
        """The state that an interrupted run of this very collection left; None: there is none, or that of another one."""
        if self.path is None or not state_path(self.path).exists():
            return None
        state = load_state(state_path(self.path))
        return state if state.fingerprint == fingerprint_of(self.model, self.windows, self.options) else None

    def run(
        self, report: OnProgress, state: CollectState | None = None, elsewhere: Elsewhere | None = None
    ) -> tuple[Imatrix, Perplexity]:
        """The importance matrix, and the text's perplexity. state: to continue from; elsewhere: workers that run the windows.

        Raises PlanError for a state of another job or too little disk space, MillError for activations that are not finite.
        """
        job, count = self.moments, len(self.windows.windows)
        if job is not None:
            begin_covariance(job, state, on_cluster=elsewhere is not None)
        with nullcontext() if elsewhere is None else elsewhere as run_batches:
            shared = run_batches if isinstance(run_batches, SharedCovariance) else None
            passes = len(job.passes) if job is not None else 1
            stage = Stage(report, "imatrix", count * passes, WINDOWS)
            frequency = self.state_frequency if self.path is not None else 0

            def on_chunk(so_far: Perplexity, total: int) -> None:
                reached = shared.reached if shared is not None else (so_far.chunks, total * passes)
                stage.reach(*reached, perplexity_text(so_far.perplexity), so_far)

            if job is not None and shared is None and passes > 1:
                stage.time_share = time_shares(job)
                stage.time_from(state.done if state is not None else 0)
            with stage.watching(self.model):
                made = collect(
                    self.model,
                    self.windows,
                    options=self.options,
                    save_frequency=self.save_frequency if self.path is not None else 0,
                    on_save=self._save_part,
                    state_frequency=frequency,
                    on_state=self._state_saver(is_shared=elsewhere is not None),
                    resume=state,
                    on_chunk=on_chunk,
                    covariance=job.collector if job is not None and job.is_beside and shared is None else None,
                    has_final_state=job is not None
                    and frequency > 0
                    and (passes > 1 or not job.is_beside or shared is not None),
                    elsewhere=run_batches,
                )
                if job is not None:
                    finish_covariance(job, shared, frequency, stage)
        return made

    def _save_part(self, imatrix: Imatrix) -> None:
        assert self.path is not None
        imatrix.save(self.path.with_name(f"{self.path.stem}.at_{imatrix.chunk_count}{self.path.suffix}"))

    def _state_saver(self, *, is_shared: bool) -> Callable[[CollectState], None] | None:
        """What writes the state. is_shared: workers have the sums of second moments."""
        path, job = self.path, self.moments
        if path is None:
            return None

        def save(now: CollectState) -> None:
            try:
                if job is None or is_shared or not job.is_beside:  # second moments keep a state of their own
                    now.save(state_path(path))
                elif job.is_due() or now.done == len(self.windows.windows):
                    job.prepare_state(now.done)
                    now.save(state_path(path))
                    job.commit_state()
            except MillError as error:
                warn([f"{error}; the work continues, but there is less to resume from"])

        return save

    def write(self, imatrix: Imatrix) -> None:
        """Writes the result, and removes the states."""
        assert self.path is not None
        imatrix.save(self.path)
        if self.moments is not None:
            self.moments.finish()
        state_path(self.path).unlink(missing_ok=True)
