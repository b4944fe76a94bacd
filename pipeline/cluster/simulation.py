"""What a job takes on so many machines: each of its pieces is followed through threads, network, storage and scheduler.

A simulation by discrete events. Transfers go through servers that handle one after the other at a rate; threads take pieces in
order, read, compute and write them, one at a time. Beside it stands the estimate that such queues have: no part of the cluster
can do its share of the job faster than its rate.
"""

from __future__ import annotations

import heapq
from collections.abc import Generator, Sequence
from dataclasses import field

from ...data_classes import dataclass

PER_THREAD = 2  # pieces in flight for each thread (see `ordered_map`)


@dataclass(frozen=True)
class PieceWork:
    """What a piece takes. seconds: of one thread for decoding and encoding; read, written: bytes; checked: bytes that are read
    once more for the checksum of the tensor that ends with this piece."""

    seconds: float
    read: int
    written: int
    checked: int = 0


@dataclass(frozen=True)
class ClusterRates:
    """The speeds of the machines and of what they share.

    machines, threads  how many, and the threads of each
    read, write        bytes per second of the shared storage, for all machines together; it does one after the other
    network            bytes per second of a machine's network, in each direction
    relay              bytes per second of results that are collected, which pass through the scheduler
    piece_seconds      of the scheduler and the process that gives the work, for each piece
    start_seconds      until the workers have made their plans
    is_collected       whether workers send what they make through the scheduler, instead of writing it to the storage
    """

    machines: int
    threads: int
    read: float
    write: float
    network: float
    relay: float
    piece_seconds: float
    start_seconds: float
    is_collected: bool = False


def estimate(pieces: Sequence[PieceWork], rates: ClusterRates) -> dict[str, float]:
    """Seconds that each part of the cluster is busy: 'encoding', 'storage', 'network' of a machine, 'scheduler'.

    The job takes no less than the longest of them and `start_seconds`, and little more while none of the pieces is long.
    """
    read = sum(p.read + p.checked for p in pieces)
    written = sum(p.written for p in pieces)
    network = max(read, written) / rates.machines / rates.network
    if rates.is_collected:  # all of it comes to one machine, and leaves that for the storage
        network = max(network, written / min(rates.network, rates.relay))
    return {
        "encoding": sum(p.seconds for p in pieces) / (rates.machines * rates.threads),
        "storage": read / rates.read + written / rates.write,
        "network": network,
        "scheduler": rates.piece_seconds * len(pieces),
    }


def simulate(pieces: Sequence[PieceWork], rates: ClusterRates) -> float:
    """Seconds from the start to the last byte. See the module."""
    return _Simulation(pieces, rates).run()


@dataclass
class _Server:
    """Does one thing after the other. free: the time at which it has done all that came."""

    free: float = 0.0

    def serve(self, now: float, seconds: float) -> float:
        """The time at which what comes now, and takes so long, is done."""
        self.free = max(now, self.free) + seconds
        return self.free


@dataclass
class _Machine:
    inward: _Server = field(default_factory=_Server)
    outward: _Server = field(default_factory=_Server)


# A process of the simulation yields the servers that it needs together, each with seconds; or nothing but seconds.
_Step = tuple[list[tuple[_Server, float]], float]


class _Simulation:
    def __init__(self, pieces: Sequence[PieceWork], rates: ClusterRates):
        self.pieces, self.rates = pieces, rates
        self.storage, self.scheduler, self.head = _Server(), _Server(), _Machine()
        self.next, self.last = 0, rates.start_seconds
        self.consumed, self.finished = 0, set[int]()  # pieces, of those that are collected in order
        self.events: list[tuple[float, int, Generator[_Step, None, None]]] = []
        self.idle: list[_Machine] = []
        self.count = 0

    def run(self) -> float:
        machines = [_Machine() for _ in range(self.rates.machines)]
        for machine in machines * self.rates.threads:  # threads of different machines take turns
            self._begin(self.rates.start_seconds, machine)
        while self.events:
            now, _, process = heapq.heappop(self.events)
            self._advance(now, process)
        return self.last

    def _schedule(self, time: float, process: Generator[_Step, None, None]) -> None:
        self.count += 1
        heapq.heappush(self.events, (time, self.count, process))

    def _begin(self, now: float, machine: _Machine) -> None:
        """A thread of a machine takes the next piece, or waits for one."""
        slots = PER_THREAD * self.rates.machines * self.rates.threads
        if self.next == len(self.pieces):
            return
        if self.rates.is_collected and self.next >= self.consumed + slots:
            self.idle.append(machine)
            return
        number = self.next
        self.next += 1
        self._schedule(now, self._piece(number, machine))

    def _advance(self, now: float, process: Generator[_Step, None, None]) -> None:
        self.now = now
        try:
            servers, seconds = next(process)
        except StopIteration:
            return
        done = max([server.serve(now, needed) for server, needed in servers], default=now)
        self._schedule(done + seconds, process)

    def _piece(self, number: int, machine: _Machine) -> Generator[_Step, None, None]:
        """A thread works on a piece; its bytes go through the storage and the machine's network at the same time."""
        piece, rates = self.pieces[number], self.rates
        yield [(self.scheduler, rates.piece_seconds)], 0.0
        yield self._moved(piece.read, rates.read, machine.inward)
        yield [], piece.seconds
        if rates.is_collected:
            relayed = piece.written / min(rates.network, rates.relay)
            yield [(machine.outward, piece.written / rates.network), (self.head.inward, relayed)], 0.0
            self._begin(self.now, machine)
            yield self._moved(piece.written, rates.write, self.head.outward)
            self._consume(number)
        else:
            yield self._moved(piece.written, rates.write, machine.outward)
            if piece.checked:
                yield self._moved(piece.checked, rates.read, machine.inward)
            self._begin(self.now, machine)
        self.last = max(self.last, self.now)

    def _moved(self, nbytes: int, rate: float, network: _Server) -> _Step:
        return [(self.storage, nbytes / rate), (network, nbytes / self.rates.network)], 0.0

    def _consume(self, number: int) -> None:
        """A piece has come back; threads that waited for the ones before it go on."""
        self.finished.add(number)
        while self.consumed in self.finished:
            self.finished.discard(self.consumed)
            self.consumed += 1
        waiting, self.idle = self.idle, []
        for machine in waiting:
            self._begin(self.now, machine)
