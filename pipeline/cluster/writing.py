"""Carrying out a plan with the workers of a cluster: what `jobs.execute` is given to write with, and who did how much."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...formats import TensorSource
from ...jobs.execute import OpenFiles, Pending, Progress, ordered_writer
from ...jobs.plan import Plan
from .call import ClusterCall, sent_fields
from .connection import Cluster, open_cluster
from .drift_files import DriftFiles, drift_files
from .ordered_map import PER_THREAD, Done, map_ordered, run_on_each
from .pieces import Cut, Span, cut, piece_weights
from .worker_job import Checksum, Collect, Preparation, Store, WorkerJob, run

if TYPE_CHECKING:
    from ...quantize.covariance.drift import Drift

MAX_COLLECTED_BYTES = 64 << 20  # of a piece that is sent back


@dataclass
class Share:
    """What one worker did: pieces, bytes of output, and the seconds of its threads."""

    worker: str
    pieces: int = 0
    nbytes: int = 0
    seconds: float = 0.0


@contextmanager
def cluster_writer(call: ClusterCall, plan: Plan, source: TensorSource) -> Iterator[ClusterWriter]:
    """Opens the cluster, and has every worker make the plan. Raises PlanError, before anything is written, as `open_cluster`
    does, and where a plan cannot be made or is another."""
    with open_cluster(call.address) as cluster:
        sent = {name: cluster.send(getattr(call.request, name)) for name in sent_fields(call.request)}
        job = WorkerJob(call.plan, replace(call.request, **sent), plan.fingerprint)
        writer = ClusterWriter(cluster, job, call.output, source)
        run_on_each(cluster, run, Preparation(writer.job))
        yield writer


class ClusterWriter:
    """Writes tensors of a plan with the workers; an instance is what `jobs.execute.execute` takes as `write`.

    shares    worker -> what it did; replaced: (tensor, weights that were written as 0)
    """

    def __init__(self, cluster: Cluster, job: WorkerJob, output: str, source: TensorSource):
        self.cluster, self.job, self._output = cluster, job, output
        self._file_of = {name: str(tensor.files[0]) for name, tensor in source.tensors.items() if tensor.files}
        self.shares: dict[str, Share] = {}
        self.replaced: list[tuple[str, int]] = []

    def __call__(self, files: OpenFiles, pending: Pending, record: Callable[[str, str], None], progress: Progress) -> None:
        slots = self.cluster.slots
        is_shared = self._output == "shared"
        cuts = list(cut(pending, piece_weights(pending, slots), None if is_shared else MAX_COLLECTED_BYTES))
        files.sync()  # so that other machines see whose .part files these are
        advance = self._with_workers(progress)
        if is_shared:
            self._store(cuts, record, advance)
        else:
            self._collect(files, cuts, pending, record, advance)

    def sorted_shares(self) -> list[Share]:
        """What each worker did, the one that made most first."""
        return sorted(self.shares.values(), key=lambda share: (-share.nbytes, share.worker))

    def follow(
        self,
        files: OpenFiles,
        pending: Pending,
        matrices: int,
        drift_of: Callable[[int], Drift],
        record: Callable[[str, str], None],
        progress: Progress,
    ) -> None:
        """Writes the tensors that have one input, for what those before them make of a text.

        matrices: that have inputs of their own; drift_of: number of a matrix -> what is known of its inputs, which the workers
        read from files beside the output. With `matrices` each piece is of one.
        """
        weights = pending[0][0].n_elements // matrices if matrices > 1 else piece_weights(pending, self.cluster.slots)
        cuts = list(cut(pending, weights))
        with drift_files(files.plan, pending, cuts, matrices, drift_of) as drifts:
            self._store(cuts, record, self._with_workers(progress), drifts)

    def _store(
        self, cuts: Sequence[Cut], record: Callable[[str, str], None], progress: Progress, drifts: DriftFiles | None = None
    ) -> None:
        """Workers write. A tensor of several pieces is read once more, by one of them, for its checksum."""
        queue: deque[Store | Checksum] = deque(Store(self.job, one, drifts and drifts.address) for one in cuts)
        tensors = _TensorSpans(cuts)

        def before(piece: Store | Checksum) -> None:
            if drifts is not None and isinstance(piece, Store):
                drifts.write(piece.cut)

        for done in map_ordered(self.cluster, run, _drained(queue, before), ordered=False, near=self._first_file):
            if isinstance(done.piece, Checksum):
                record(str(done.piece), done.value)
                continue
            if drifts is not None:
                drifts.remove(done.piece.cut)
            self._count(done, done.piece.cut)
            for span, digest in zip(done.piece.cut.spans, done.value.digests, strict=True):
                progress(span.nbytes, span.tensor)
                digests = tensors.add(span, digest)
                if digests is not None and len(digests) == 1:
                    record(span.tensor, digest)
                elif digests is not None:
                    queue.appendleft(Checksum(self.job, tensors.spans[span.tensor], digests))

    def _collect(
        self, files: OpenFiles, cuts: Sequence[Cut], pending: Pending, record: Callable[[str, str], None], progress: Progress
    ) -> None:
        """Workers send what they make, and this process writes it in order."""
        sinks = {output.name: files.sink(output, location) for output, location in pending}
        number = 0
        with closing(ordered_writer(pending, PER_THREAD, record, progress)) as writer:
            for done in map_ordered(self.cluster, run, (Collect(self.job, one) for one in cuts), near=self._first_file):
                self._count(done, done.piece.cut)
                for span, data in zip(done.piece.cut.spans, done.value.data, strict=True):
                    writer.slots.acquire()
                    writer.put(number, sinks[span.tensor], data)
                    number += 1
                if writer.failures:
                    raise writer.failures[0]

    def _first_file(self, piece: Store | Collect | Checksum) -> str:
        """The file of the source that a piece reads first; for a checksum and where that is not known, the tensor's name."""
        name = str(piece) if isinstance(piece, Checksum) else piece.cut.spans[0].tensor
        return name if isinstance(piece, Checksum) else self._file_of.get(name, name)

    def _count(self, done: Done[Any, Any], made: Cut) -> None:
        share = self.shares.setdefault(done.worker, Share(self.cluster.name(done.worker)))
        share.pieces, share.nbytes, share.seconds = share.pieces + 1, share.nbytes + made.nbytes, share.seconds + done.seconds
        self.replaced += done.value.replaced.items()

    def _with_workers(self, progress: Progress) -> Progress:
        """Progress that names the number of workers beside the tensor."""

        def advance(count: int, tensor: str) -> None:
            progress(count, f"{tensor}, {self.cluster.known} workers")

        return advance


class _TensorSpans:
    """The spans of each tensor, in order, and the digests that have come for them."""

    def __init__(self, cuts: Sequence[Cut]):
        spans: dict[str, list[Span]] = {}
        for one in cuts:
            for span in one.spans:
                spans.setdefault(span.tensor, []).append(span)
        self.spans = {tensor: tuple(parts) for tensor, parts in spans.items()}
        self._digests: dict[str, dict[int, str]] = {}

    def add(self, span: Span, digest: str) -> tuple[str, ...] | None:
        """The digests of all spans of this one's tensor, in order, if none is missing."""
        digests = self._digests.setdefault(span.tensor, {})
        digests[span.start] = digest
        spans = self.spans[span.tensor]
        return tuple(digests[s.start] for s in spans) if len(digests) == len(spans) else None


class _drained(Iterator[Any]):
    """What is in a queue, as long as there is something; before: called with each piece as it is taken."""

    def __init__(self, queue: deque[Any], before: Callable[[Any], None]):
        self._queue, self._before = queue, before

    def __next__(self) -> Any:
        if not self._queue:
            raise StopIteration
        piece = self._queue.popleft()
        self._before(piece)
        return piece
