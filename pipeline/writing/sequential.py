"""Encoding matrix after matrix in the order of the model's graph, each for what those before it, quantised, make of a text."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from ...errors import UsageError
from ...formats import SourceTensor, TensorSource, dims
from ...formats.gguf import open_shards
from ...imatrix.calibration import cut_windows
from ...imatrix.covariance.estimate import multiplications
from ...imatrix.texts import check_texts, parse_text, read_segments
from ...jobs.execute import OpenFiles, Pending, Progress, WriteTensors, write_by_threads
from ...jobs.outputs import Produce
from ...jobs.plan import Plan
from ...operating_system.memory import free_bytes
from ...operating_system.processors import available_cpus
from ...quantize.covariance.drift import Correction, DriftSums, correction_of
from ...quantize.covariance.matrix.covariance_matrix import EFFORTS, enough_tokens
from ...quantize.covariance.matrix.prepared import PreparedCovariance, prepare
from ...quantize.gguf_source import gguf_source
from ...quantize.tensor_outputs import TensorRows
from ...runtime import load_model
from ...runtime.graph.ops import ExpertLinear
from ...runtime.placement.torch_devices import import_torch
from ..common.figures import duration, size_text
from ..common.messages import note

if TYPE_CHECKING:
    from ...runtime.backends.torch.two_streams import KnownInput, MatrixInput, TwoStreams
    from ..requests.quantize import QuantizeRequest

N_CTX, WINDOWS = 512, 128  # tokens of a window, and windows of the text, unless other numbers are given
_SAMPLED_MATRICES = 8  # of those that share an input
_TOKENS_SHARE = 0.5  # of those of the file that the covariance of the text's own inputs needs to take its place
_KEPT_PER_THREAD = 6  # sums, covariance and correction of the matrices that are encoded, and of those just before
# Of an input, times the square of its columns: bytes of the sums of both halves and of what is solved in float64, and products
# in whose time it is solved, times the columns.
_SUMS_BYTES, _SOLVING = 72, 4
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
    threads = request.threads or available_cpus()
    chunks, asked_by = request.sequential_chunks, _asked_by(request)
    return SequentialEncoding(
        source, Path(request.sequential), chunks=chunks, threads=threads, device=device, asked_by=asked_by
    )


def refuse_other_orders(request: QuantizeRequest) -> None:
    """Raises UsageError for what does not take all matrices of a model one after the other."""
    excluding = {
        "--cluster": request.cluster,
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

    windows  int64 [n, n_ctx]; device: of torch; threads: of the processor; asked_by: the option, for errors
    """

    def __init__(
        self,
        source: TensorSource,
        text: Path,
        *,
        chunks: int | None = None,
        threads: int = 1,
        device: str | None = None,
        asked_by: str = "--sequential",
    ):
        """Raises PlanError without torch, and for a text that cannot be read or is too short."""
        import_torch(asked_by)
        self._model, self._threads, self._device = load_model(source, threads=threads), threads, device or "cpu"
        count, n_ctx = chunks or WINDOWS, min(N_CTX, self._model.graph.n_ctx_train or N_CTX)
        segments = read_segments(self._model, [parse_text(str(text))], max_tokens=(count + 1) * n_ctx)
        self.windows = cut_windows(self._model, segments, n_ctx, chunks=count).windows

    def _inputs(self, plan: Plan) -> dict[str, MatrixInput]:
        """The tensors of a plan that are encoded in order, as the graph reads them, and their inputs."""
        from ...runtime.backends.torch.two_streams import matrix_inputs

        chosen = {o.name for o in plan.outputs if isinstance(o.produce, TensorRows) and o.produce.may_follow}
        return {name: one for name, one in matrix_inputs(self._model.graph).items() if name in chosen}

    def describe(self, plan: Plan) -> None:
        """Says what the streams take."""
        inputs, nbytes = self._inputs(plan), self._kept_bytes(plan)
        where = "memory" if self._folder(plan) is None else f"temporary files in {plan.files[0].path.absolute().parent}"
        distinct = set(inputs.values())
        sums = max((_SUMS_BYTES * one.columns**2 * min(one.matrices, self._threads) for one in distinct), default=0)
        note(
            f"sequential: {len(inputs)} tensors in the order of the graph, over {len(self.windows)} windows of "
            f"{self.windows.shape[1]} tokens; both streams of activations take {size_text(nbytes)} of {where}, the sums of an "
            f"input up to {size_text(sums)} of memory, streams and sums about {duration(self._seconds(distinct))} beside "
            "encoding"
        )

    def _seconds(self, inputs: Collection[MatrixInput]) -> float:
        """Of both streams and of the sums, roughly, on a machine that does nothing else; attention is not counted."""
        import torch

        from ...runtime.backends.torch.product_speed import products_per_second

        tokens = self.windows.size
        streams = 2 * tokens * sum(count for count, _ in multiplications(self._model))
        sums = 0
        for one in inputs:
            seen = one.op.routing.shape[0] / one.matrices if isinstance(one.op, ExpertLinear) and one.matrices > 1 else 1
            sums += one.matrices * one.columns**2 * (2 * tokens * seen + _SOLVING * one.columns)
        return (streams + sums) / products_per_second(torch.device(self._device), self._threads)

    def _kept_bytes(self, plan: Plan) -> int:
        from ...runtime.backends.torch.two_streams import kept_bytes, steps_of

        graph = self._model.graph
        return self.windows.size * kept_bytes(graph, steps_of(graph, self._inputs(plan)))

    def _folder(self, plan: Plan) -> Path | None:
        """Where values are kept in files; None: in memory."""
        free = free_bytes()
        fits = free is None or self._kept_bytes(plan) <= free // _MEMORY_SHARE
        return None if fits else plan.files[0].path.absolute().parent

    def writer(self, plan: Plan, threads: int) -> WriteTensors:
        """What makes and writes the tensors of a plan."""
        return partial(self._write, plan, threads)

    def _write(
        self,
        plan: Plan,
        threads: int,
        files: OpenFiles,
        pending: Pending,
        record: Callable[[str, str], None],
        progress: Progress,
    ) -> None:
        by_name = {output.name: (output, location) for output, location in pending}
        inputs = self._inputs(plan)
        others = [each for name, each in by_name.items() if name not in inputs]
        write_by_threads(files, others, record, progress, threads=threads)
        inputs = {name: one for name, one in inputs.items() if name in by_name}
        if not inputs:
            return

        def encode(one: MatrixInput, known: KnownInput) -> None:
            followers = _Followers(known, one.matrices, _KEPT_PER_THREAD * threads)
            ready = [by_name[name] for name, input in inputs.items() if input is one]
            outputs = [(replace(output, produce=followers.rows_of(output.produce)), location) for output, location in ready]
            write_by_threads(files, outputs, record, progress, threads=threads)

        self._streams(plan, inputs).run(encode)

    def _streams(self, plan: Plan, inputs: Mapping[str, MatrixInput]) -> TwoStreams:
        from ...runtime.backends.torch.two_streams import TwoStreams
        from ...runtime.backends.torch.weights import Weights

        written = gguf_source(open_shards([file.part for file in plan.files]))
        lying = dict.fromkeys(self._model.stored.tensors) if self._device != "cpu" else {}  # copied for each use
        original, changed = (Weights(source, lying, exact=True) for source in (self._model.stored, written))
        return TwoStreams(
            self._model.graph, original, changed, self.windows, inputs, device=self._device, threads=self._threads,
            folder=self._folder(plan),
        )  # fmt: skip


class _Followers:
    """The matrices that have one input: what they are encoded for, and with which covariance."""

    def __init__(self, known: KnownInput, matrices: int, most: int):
        """matrices: that have inputs of their own; most: of what is made for a matrix, that is kept."""
        self._known, self._matrices, self._once = known, matrices, _Once(most)

    def rows_of(self, produce: Produce) -> Produce:
        """Encoded rows of the targets of a tensor, in place of those of its weights."""
        assert isinstance(produce, TensorRows)
        tensor = produce.tensor
        rows = dims(tensor.shape)[1]

        def correction(number: int) -> Correction | None:
            return correction_of(self._halves(number), self._sample(tensor, number))

        def read(start: int, stop: int) -> np.ndarray:
            x, number = np.ascontiguousarray(tensor.read(start, stop), np.float32), self._number(start // rows)
            found = self._once.get((tensor.name, number), lambda: correction(number))
            return x if found is None else found.target(x)

        def covariance_of(matrix: int) -> PreparedCovariance | None:
            number = self._number(matrix)
            first, second = self._halves(number)
            few = not all(enough_tokens(half.tokens, len(half.squares)) for half in (first, second))
            if few or first.tokens + second.tokens < _TOKENS_SHARE * produce.collected_tokens(matrix):
                return None
            return self._once.get(("covariance", number), lambda: prepare(first.plus(second).covariance()))

        return produce.of_targets(read, covariance_of)

    def _number(self, matrix: int) -> int:
        """Of the input of a matrix."""
        return matrix if self._matrices > 1 else 0

    def _halves(self, number: int) -> tuple[DriftSums, DriftSums]:
        return self._once.get(("sums", number), lambda: self._known.halves(number))

    def _sample(self, tensor: SourceTensor, number: int) -> np.ndarray:
        """Rows of a matrix, or of several that share an input."""
        _, rows, count = dims(tensor.shape)
        matrices = [number] if self._matrices > 1 else range(0, count, -(-count // _SAMPLED_MATRICES))
        return np.concatenate([tensor.read(one * rows, (one + 1) * rows)[:: len(matrices)] for one in matrices])


class _Once:
    """Makes things when they are first asked for, each once while threads wait; the last `most` are kept."""

    def __init__(self, most: int):
        self._most, self._lock = most, threading.Lock()
        self._made: OrderedDict[tuple[str, int], Future[Any]] = OrderedDict()

    def get(self, key: tuple[str, int], make: Callable[[], Any]) -> Any:
        """What `make` gives, or what it raises."""
        with self._lock:
            is_mine = key not in self._made
            future = self._made.setdefault(key, Future())
            self._made.move_to_end(key)
            while len(self._made) > self._most:
                self._made.popitem(last=False)
        if is_mine:
            try:
                future.set_result(make())
            except BaseException as error:
                future.set_exception(error)
        return future.result()
