"""How long a plan takes on 1, 2, ... machines: its pieces, timed by this machine's encoders, followed through a simulation."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict
from functools import cache
from typing import Any

import numpy as np

from ...data_classes import dataclass
from ...formats import TYPES
from ...formats.fp8 import fp8_to_f32
from ...jobs.outputs import Output
from ...jobs.plan import Plan
from ...operating_system.processors import available_cpus
from ...quantize.timing import encode_speed, is_copied, is_weighted
from .pieces import Cut, cut, piece_weights
from .simulation import ClusterRates, PieceWork, estimate, simulate
from .writing import MAX_COLLECTED_BYTES

# Measured with benchmarks/cluster.py (benchmarks/results/cluster.json); a network was not there to be measured.
READ_RATE, WRITE_RATE = 2.1e9, 0.18e9  # bytes per second of a disk
RELAY_RATE = 0.16e9  # bytes per second of results that come through the scheduler
NETWORK_RATE = 1.25e9  # bytes per second: 10 Gbit/s
PIECE_SECONDS = 0.0075  # of the scheduler and of the process that gives the work, per piece
START_SECONDS = 10.0  # a worker's imports and its plan of a model of 671 B weights

_BYTES = {"f32": 4.0, "f16": 2.0, "bf16": 2.0, "f8_e4m3": 1.0, "f8_e5m2": 1.0, "mxfp4": 0.53125, "nvfp4": 0.5625}
_SAMPLE, _SECONDS = (512, 1024), 0.1  # of the measurement of a decoder


@dataclass(frozen=True)
class MachineCount:
    """What a job takes on so many machines.

    pieces     that it is cut into
    busy       part of the cluster -> seconds that it is busy (see `simulation.estimate`)
    estimated  seconds: the longest of them, and the start
    simulated  seconds until the last piece is written
    """

    machines: int
    pieces: int
    busy: dict[str, float]
    estimated: float
    simulated: float

    @property
    def bound(self) -> str:
        """The part that is busy longest."""
        return max(self.busy, key=lambda name: self.busy[name])


@dataclass(frozen=True)
class ClusterForecast:
    """Forecasts for several numbers of machines. rates: what they rest on, by name; all are projected, not measured."""

    rows: list[MachineCount]
    rates: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """What --json prints: rates, and for each number of machines its fields and `bound`."""
        return {"rates": self.rates, "machines": [asdict(row) | {"bound": row.bound} for row in self.rows]}


def forecast_cluster(
    plan: Plan,
    machines: Sequence[int],
    *,
    threads: int | None = None,
    output: str = "shared",
    read_rate: float | None = None,
    write_rate: float | None = None,
    network_rate: float | None = None,
    encode_rate: float | None = None,
    relay_rate: float = RELAY_RATE,
    piece_seconds: float = PIECE_SECONDS,
    start_seconds: float = START_SECONDS,
) -> ClusterForecast:
    """What carrying out a plan takes on each of these numbers of machines.

    threads       of each machine; None: as many as this one has. output: 'shared' or 'collect', as for `quantize_model`
    read_rate, write_rate, network_rate, relay_rate, piece_seconds, start_seconds
                  see `ClusterRates`
    encode_rate   weights per second that a thread decodes and encodes, whatever the type; None: measured here for each type
    """
    cores = threads or available_cpus()
    read, write, network = read_rate or READ_RATE, write_rate or WRITE_RATE, network_rate or NETWORK_RATE
    shared = {"read": read, "write": write, "network": network, "relay": relay_rate}
    shared |= {"piece_seconds": piece_seconds, "start_seconds": start_seconds}
    speeds = _Speeds(encode_rate, is_weighted(plan))
    pending = list(zip(plan.outputs, plan.locations, strict=True))
    outputs = {o.name: o for o in plan.outputs}
    rows, is_collected = [], output == "collect"
    for count in machines:
        largest = MAX_COLLECTED_BYTES if is_collected else None
        cuts = list(cut(pending, piece_weights(pending, count * cores), largest))
        pieces = _pieces(cuts, outputs, speeds, has_checksums=not is_collected)
        cluster = ClusterRates(count, cores, **shared, is_collected=is_collected)
        busy = estimate(pieces, cluster)
        rows.append(MachineCount(count, len(cuts), busy, start_seconds + max(busy.values()), simulate(pieces, cluster)))
    return ClusterForecast(rows, {"threads": cores, "output": output, **shared, "weights_per_second": speeds.used})


def _pieces(cuts: Sequence[Cut], outputs: dict[str, Output], speeds: _Speeds, has_checksums: bool) -> list[PieceWork]:
    """has_checksums: a tensor of several pieces is read once more when the last of them is written."""
    last = {span.tensor: i for i, one in enumerate(cuts) for span in one.spans}
    first: dict[str, int] = {}
    pieces = []
    for i, one in enumerate(cuts):
        seconds, read, checked = 0.0, 0.0, 0
        for span in one.spans:
            output = outputs[span.tensor]
            weights = (span.stop - span.start) * output.shape[0]
            seconds += speeds.seconds(output, weights)
            read += weights * _source_bytes(output)
            if first.setdefault(span.tensor, i) != i == last[span.tensor] and has_checksums:
                checked += output.nbytes
        pieces.append(PieceWork(seconds, int(read), one.nbytes, checked))
    return pieces


def _source_bytes(output: Output) -> float:
    """Bytes per weight that are read."""
    names = output.source_type.split("+")
    if names[0] in TYPES and not TYPES[names[0]].is_float:
        return TYPES[names[0]].nbytes(output.shape) / output.n_elements
    return max(_BYTES.get(name, 2.0) for name in names)


class _Speeds:
    """Seconds of a thread of this machine, with all its threads at work. used: type -> weights per second."""

    def __init__(self, given: float | None, weighted: bool):
        self._given, self._weighted = given, weighted
        self.used: dict[str, float] = {}

    def seconds(self, output: Output, weights: int) -> float:
        if is_copied(output):
            return 0.0
        speed = self._given or _encode_speed(output.type.name, output.source_type, self._weighted)
        self.used[output.type.name] = min(speed, self.used.get(output.type.name, speed))
        decoding = weights / _fp8_speed() if output.source_type.startswith("f8_") and self._given is None else 0.0
        return weights / speed + decoding


@cache
def _encode_speed(name: str, source_type: str, weighted: bool) -> float:
    cores = available_cpus()
    return encode_speed(TYPES[name], cores, source_type=source_type, is_weighted=weighted) / cores


@cache
def _fp8_speed() -> float:
    """Weights per second that one thread decodes."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(0, 120, _SAMPLE, np.uint8), np.ones((_SAMPLE[0], _SAMPLE[1] // 128), np.float32)
    fp8_to_f32(codes, "f8_e4m3", scales, 128)
    began, calls = time.perf_counter(), 0
    while calls == 0 or time.perf_counter() - began < _SECONDS:
        fp8_to_f32(codes, "f8_e4m3", scales, 128)
        calls += 1
    return calls * codes.size / (time.perf_counter() - began)
