"""Encoding matrix after matrix in the order of the model's graph, each for what those before it, quantised, make of a text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING

import xxhash

from ...errors import PlanError, UsageError
from ...formats import TensorSource, dims
from ...formats.gguf import open_shards
from ...imatrix.calibration import cut_windows
from ...imatrix.covariance.gradient_run import WRITING
from ...imatrix.texts import check_texts, parse_text, read_segments
from ...jobs.execute import OpenFiles, Pending, Progress, WriteTensors, write_by_threads
from ...jobs.plan import Plan
from ...jobs.steps import begin_step
from ...operating_system.memory import free_bytes
from ...operating_system.processors import available_cpus
from ...quantize.covariance.drift import FINDING, FOLLOWING, MISSED, SUMS, Drift, drift_of
from ...quantize.covariance.matrix.covariance_matrix import EFFORTS
from ...quantize.followers import Followers, sample
from ...quantize.gguf_source import gguf_source
from ...quantize.tensor_outputs import TensorRows
from ...runtime import load_model
from ...runtime.graph.ops import ExpertLinear
from ...runtime.output_gradients import GroupCost, gradients_of, group_cost
from ...runtime.placement.torch_devices import import_torch
from ...runtime.timing import products
from ...simd.workers import ALONE, Workers
from ..common.figures import duration, size_text
from ..common.forecast import Forecast
from ..common.memory import memory_budget
from ..common.messages import note, warn
from ..common.reading import TORCH_BYTES, TORCH_STARTING, start_seconds

if TYPE_CHECKING:
    from ...runtime.backends.torch.stream_steps import MatrixInput, StreamStep
    from ...runtime.backends.torch.two_streams import KnownInput, TwoStreams
    from ..cluster.writing import ClusterWriter
    from ..requests.quantize import QuantizeRequest
    from ..tuning.tuning import Tuning

N_CTX, WINDOWS = 512, 128  # tokens of a window, and windows of the text, unless other numbers are given
# Products in whose time what follows of an input's sums is solved: times the cube of its columns, and, times their square, for
# a row on which a step is chosen, of which there are so many at the most, and for one that is encoded (256 to 2,048 columns).
_SOLVING, _CHOOSING, _CHOSEN, _TARGET = 0.5, 15, 256, 3.2
_MEMORY = 4 << 30  # bytes for what is computed of inputs, where nothing is said
_MEMORY_SHARE = 2  # of what is free: values take memory up to one part in so many, else temporary files


def windows_within(chunks: int, n_ctx: int) -> int:
    """Windows to read of a text of which only so many of n_ctx tokens may be read."""
    return min(WINDOWS, chunks * n_ctx // N_CTX)


def text_identity(path: Path, chunks: int | None) -> str:
    """What of a text decides the encoded bytes: a digest of it, and how much is read. Raises PlanError if it cannot be read."""
    check_texts([parse_text(str(path))])
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while part := file.read(1 << 20):
            digest.update(part)
    return f"{digest.hexdigest()} {chunks or WINDOWS}"


def sequential_encoding(request: QuantizeRequest, source: TensorSource, device: str | None) -> SequentialEncoding | None:
    """What encodes matrices one after the other, if a request asks for that. Raises as `refuse_other_orders`."""
    if request.sequential is None:
        return None
    refuse_other_orders(request)
    threads, memory = request.threads or available_cpus(), memory_budget(request.memory)
    chunks, asked_by = request.sequential_chunks, _asked_by(request)
    encoding = SequentialEncoding(
        source, Path(request.sequential), chunks=chunks, threads=threads, memory=memory, device=device, asked_by=asked_by
    )
    if request.tune:
        from ..tuning.tuning import Tuning

        original = load_model(source, threads=threads, exact=True)
        encoding.tuning = Tuning(original, encoding.windows, threads=threads, device=device or "cpu")
    return encoding


def _sums_bytes(one: MatrixInput) -> int:
    """Of the sums of one matrix, of both halves."""
    return SUMS * one.columns**2 + MISSED * one.missed_rows * one.columns


def refuse_other_orders(request: QuantizeRequest) -> None:
    """Raises UsageError for what does not take all matrices of a model one after the other."""
    if request.sequential is not None and request.cluster_output == "collect":
        raise UsageError(
            f"{_asked_by(request)} on a cluster hands moments to workers in the output's folder: give --cluster-output shared"
        )
    excluding = {
        "--only-shards": request.only_shards,
        "--partial-requant": request.partial_requant,
        "--delete-source-shards": request.delete_source_shards,
    }
    for name, value in excluding.items():
        if value and request.sequential is not None:
            raise UsageError(f"{_asked_by(request)} encodes the whole model here, one matrix after the other: leave out {name}")


def _asked_by(request: QuantizeRequest) -> str:
    return "--sequential" if request.effort in (None, *EFFORTS) else f"--effort {request.effort}"


class SequentialEncoding:
    """The encoding of a source's matrices for what a text makes of those before them.

    windows  int64 [n, n_ctx]; device: of torch; threads: of the processor; memory: bytes for what is computed of inputs, whose
             sums are kept in temporary files where it is too little; asked_by: the option, for errors
    tuning   what is done with the tensors when all are encoded; None: nothing
    on_item  called with what is done, while no bytes are written
    """

    def __init__(
        self,
        source: TensorSource,
        text: Path,
        *,
        chunks: int | None = None,
        threads: int = 1,
        memory: int = _MEMORY,
        device: str | None = None,
        asked_by: str = "--sequential",
    ):
        """Raises PlanError without torch, and for a text that cannot be read or is too short."""
        import_torch(asked_by)
        from ...runtime.backends.torch.stream_steps import added_late

        self.tuning: Tuning | None = None
        self.on_item: Callable[[str], None] = lambda item: None
        self._model, self._threads, self._device = load_model(source, threads=threads), threads, device or "cpu"
        self._memory, self._workers = memory, Workers(threads)
        self._graph = added_late(self._model.graph)
        count, n_ctx = chunks or WINDOWS, min(N_CTX, self._model.graph.n_ctx_train or N_CTX)
        segments = read_segments(self._model, [parse_text(str(text))], max_tokens=(count + 1) * n_ctx)
        self.windows = cut_windows(self._model, segments, n_ctx, chunks=count).windows

    def _inputs(self, plan: Plan) -> dict[str, MatrixInput]:
        """The tensors of a plan that are encoded in order, as the graph reads them, and their inputs."""
        from ...runtime.backends.torch.stream_steps import matrix_inputs

        chosen = {o.name for o in plan.outputs if isinstance(o.produce, TensorRows) and o.produce.may_follow}
        return {name: one for name, one in matrix_inputs(self._graph).items() if name in chosen}

    def describe(self, plan: Plan) -> None:
        """Says what the streams take."""
        inputs, nbytes = self._inputs(plan), self._kept_bytes(plan)
        where = "memory" if self._folder(plan) is None else f"temporary files in {plan.files[0].path.absolute().parent}"
        distinct = set(inputs.values())
        sums = max((self._bytes_of(one) for one in distinct), default=0)
        files = max((_sums_bytes(one) for one in distinct if self._in_files(one)), default=0)
        note(
            f"sequential: {len(inputs)} tensors in the order of the graph, over {len(self.windows)} windows of "
            f"{self.windows.shape[1]} tokens; both streams of activations take {size_text(nbytes)} of {where}, "
            f"the moments of an input up to {size_text(sums)} of memory"
            + (f" and {size_text(files)} of temporary files" if files else "")
            + f", streams and sums about {duration(self._seconds(inputs))} beside encoding"
        )
        if sums > self._memory:
            warn([f"the moments of one input take {sums:,} bytes, more than the {self._memory:,} of --memory"])

    def added_to(self, other: Forecast, plan: Plan) -> Forecast:
        """A forecast of the plan with what the streams take, and tuning after them."""
        inputs, kept = self._inputs(plan), self._kept_bytes(plan) if self._folder(plan) is None else 0
        sums = max((self._bytes_of(one) for one in set(inputs.values())), default=0)
        seconds, starting = other.seconds, start_seconds([self._model]) / self._threads
        if seconds is not None:
            more = {"torch": TORCH_STARTING / self._threads, "streams": self._seconds(inputs)}
            seconds = {**seconds, "start": max(seconds.get("start", 0.0), starting), **more}
        memory = (other.memory or 0) + TORCH_BYTES + kept + sums + self._working_bytes
        taken = replace(other, seconds=seconds, memory=memory)
        return taken if self.tuning is None else self.tuning.added_to(taken, plan)

    def _in_files(self, one: MatrixInput) -> bool:
        """Whether sums are kept in files: there is no memory for those of a single matrix."""
        return _sums_bytes(one) + FINDING * one.columns**2 > self._memory

    def _threads_for(self, one: MatrixInput, threads: int) -> int:
        """That encode at the same time, as far as there is memory for what each has to compute of an input of its own."""
        return (
            threads
            if one.matrices == 1
            else min(threads, max(1, self._memory // (_sums_bytes(one) + FINDING * one.columns**2)))
        )

    def _bytes_of(self, one: MatrixInput) -> int:
        """Of memory, at most, for what is computed of an input."""
        finding = FINDING * one.columns**2 + _sums_bytes(one) * (not self._in_files(one))
        each = max(finding, FOLLOWING * one.columns**2 + MISSED // 2 * one.missed_rows * one.columns)
        return each * min(one.matrices, self._threads_for(one, self._threads))

    @cached_property
    def _group(self) -> tuple[GroupCost, int] | None:
        """What gradients of a group of windows take, and how many these are; None where an op has no derivative."""
        with suppress(PlanError):
            gradients, shape = gradients_of(self._model), self.windows.shape
            return group_cost(gradients, *shape), gradients.windows_of_group(shape[1])
        return None

    @property
    def _working_bytes(self) -> int:
        """Of the threads that compute groups of windows: forth takes half of what forth and back does."""
        return self._threads * self._group[0].part // 2 if self._group is not None else 0

    def _seconds(self, inputs: Mapping[str, MatrixInput]) -> float:
        """Of both streams, of the sums, and of what follows of these, roughly, on a machine that does nothing else. What ops do
        beside the products of weights is counted for gradients, which go forth twice, and back at the cost of both: two
        streams are half of it. inputs: of tensors by name."""
        import torch

        from ...runtime.backends.torch.product_speed import products_per_second

        tokens = self.windows.size
        streams = 2 * tokens * sum(one.per_token for one in products(self._graph.ops))
        if self._group is not None:
            cost, size = self._group
            streams += ceil(len(self.windows) / size) * (cost.products + WRITING * cost.written) / 2
        sums = 0
        for one in set(inputs.values()):
            is_routed = isinstance(one.op, ExpertLinear) and one.matrices > 1
            seen = tokens * one.op.routing.shape[0] / one.matrices if is_routed else tokens  # type: ignore[attr-defined]
            written = 4 * ((3 if is_routed else 1) * one.columns + 3 * one.missed_rows)  # what is missing, and rows of experts
            sums += one.matrices * one.columns**2 * (2 * seen + _SOLVING * one.columns)
            sums += one.matrices * seen * (one.missed_rows * one.columns + WRITING * written)
        for name, one in inputs.items():
            _, rows, matrices = dims(self._model.source.tensors[name].shape)
            sums += matrices * one.columns**2 * (_CHOOSING * min(rows, _CHOSEN) + _TARGET * rows)
        return (streams + sums) / products_per_second(torch.device(self._device), self._threads)

    def _kept_bytes(self, plan: Plan) -> int:
        from ...runtime.backends.torch.stream_steps import kept_bytes, steps_of

        return self.windows.size * kept_bytes(self._graph, steps_of(self._graph, self._inputs(plan)))

    def _folder(self, plan: Plan) -> Path | None:
        """Where values are kept in files; None: in memory."""
        free = free_bytes()
        fits = free is None or self._kept_bytes(plan) <= free // _MEMORY_SHARE
        return None if fits else plan.files[0].path.absolute().parent

    def writer(self, plan: Plan, threads: int, cluster: ClusterWriter | None = None) -> WriteTensors:
        """What makes and writes the tensors of a plan; cluster: its workers encode, the streams stay here."""
        return partial(self._write, plan, threads, cluster)

    def _write(
        self,
        plan: Plan,
        threads: int,
        cluster: ClusterWriter | None,
        files: OpenFiles,
        pending: Pending,
        record: Callable[[str, str], None],
        progress: Progress,
    ) -> None:
        by_name = {output.name: (output, location) for output, location in pending}
        inputs = self._inputs(plan)
        others = [each for name, each in by_name.items() if name not in inputs]
        if cluster is not None:
            cluster(files, others, record, progress)
        else:
            write_by_threads(files, others, record, progress, threads=threads)
        inputs = {name: one for name, one in inputs.items() if name in by_name}
        if not inputs:
            return
        folder = plan.files[0].path.absolute().parent

        def encode(one: MatrixInput, known: KnownInput) -> None:
            ready = [by_name[name] for name, input in inputs.items() if input is one]
            tensors = [output.produce.tensor for output, _ in ready if isinstance(output.produce, TensorRows)]
            workers = self._workers if one.matrices == 1 else ALONE

            def drift_at(number: int) -> Drift:
                samples = {tensor.name: sample(tensor, number, one.matrices) for tensor in tensors}
                begin_step(f"moments of {one.columns:,} columns")
                halves = known.halves(number, folder if self._in_files(one) else None)
                begin_step("what it can make up for")
                return drift_of(halves, samples, workers)

            if cluster is not None:
                cluster.follow(files, ready, one.matrices, drift_at, record, progress)
                return
            at_once = self._threads_for(one, threads)
            followers = Followers(drift_at, one.matrices, at_once, workers)
            outputs = [(replace(output, produce=followers.rows_of(output.produce)), location) for output, location in ready]
            write_by_threads(files, outputs, record, progress, threads=at_once)

        windows = 2 * len(self.windows)

        def on_windows(step: StreamStep, done: int) -> None:
            weights = [weight for one in step.inputs for weight in one.op.weights if weight.name in inputs]
            self.on_item(f"{weights[0].name}: activations of window {done} of {windows}")

        self._streams(plan, inputs).run(encode, on_windows)

    def _streams(self, plan: Plan, inputs: Mapping[str, MatrixInput]) -> TwoStreams:
        from ...runtime.backends.torch.two_streams import TwoStreams
        from ...runtime.backends.torch.weights import Weights

        written = gguf_source(open_shards([file.part for file in plan.files]))
        lying = dict.fromkeys(self._model.stored.tensors) if self._device != "cpu" else {}  # copied for each use
        original, changed = (Weights(source, lying, exact=True) for source in (self._model.stored, written))
        return TwoStreams(
            self._graph, original, changed, self.windows, inputs, device=self._device, threads=self._threads,
            folder=self._folder(plan),
        )  # fmt: skip
