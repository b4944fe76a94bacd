"""A coarser copy of a run's model that fits the memory: what runs in place of a source that would be read from the disk again
for every pass of a text."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...formats import PlanError, TensorSource
from ...jobs.code_digest import code_digest
from ...jobs.journal import journal_path
from ...jobs.plan import Plan
from ...jobs.preflight import preflight
from ...quantize.gguf_source import gguf_source
from ..planning import Quantization
from ..requests.quantize import QuantizeRequest
from .cache import key_of
from .quant import QuantRun
from .write import write_plan

STAGE = "working copy"


class WorkingCopy:
    """The copy that [source] working of a recipe asks for.

    run: what it is of; asked: as the first file of the run reads its source; kind: the type of its tensors
    """

    def __init__(self, run: QuantRun, asked: QuantizeRequest, kind: str):
        self.run, self.kind = run, kind
        fixed = replace(asked, out=run.folder.working, type=kind, recipe=None, imatrix=None, covariance=None, curvature=None)
        free = replace(fixed, effort=None, target_size=None, target_bpw=None, max_kld=None, split_max_size=None)
        job = Quantization(free, is_written=False)
        job.source = run.source
        try:
            self.plan: Plan = job.plan()
        except PlanError as error:
            raise PlanError(f"{run.path.name}: [source] working: {error}") from None

    def check(self) -> None:
        """Raises PlanError for a file in its place that is of something else."""
        run, ours = self.run, self.run.request.force or self.run.cache.was_begun(STAGE)
        preflight(self.plan, force=ours, resume=journal_path(self.plan).exists(), inputs=run.inputs, needed=0)

    @property
    def disk_needed(self) -> int:
        """Bytes that are still to be written."""
        path = self.run.folder.working
        return 0 if path.is_file() and path.stat().st_size == self.plan.file_bytes else self.plan.file_bytes

    def source(self) -> TensorSource:
        """The copy, made now if it is not there."""
        run, path = self.run, self.run.folder.working
        key = key_of(code_digest(), run.source.identity, run.reading_text, self.kind)

        def work() -> dict[str, Any]:
            how = run.request, run.report, run.how_to_continue
            return {"resumed": write_plan(self.plan, STAGE, run.source, run.source.files, *how)}

        run.cache.stage(STAGE, key, [path], work)
        return gguf_source(path)
