"""Which processors the threads of a model run on: all that the process may use, those that are given, or by NUMA node."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from ...data_classes import dataclass
from ...errors import PlanError
from ...operating_system.numa import Node, ThreadPlace, current_cpu, numa_nodes, thread_notes
from ...operating_system.processors import allowed_cpus


@dataclass(frozen=True)
class ThreadPlacement:
    """How many threads run, and where each does.

    places  one per thread, the calling thread first; empty if the system may run them anywhere
    notes   what the user should know, one line each
    """

    threads: int
    places: tuple[ThreadPlace, ...] = ()
    notes: tuple[str, ...] = ()


def place_threads(
    threads: int | None, cpus: Collection[int] | None, numa: str | None, root: Path = Path("/")
) -> ThreadPlacement:
    """threads  how many; None: one per processor that they may use cpus     the processors that they may use, by number; None:
    all that the process may use numa     None: as the system pleases. 'distribute': thread i runs on node i modulo their
    number, and new memory is spread over
             the nodes. 'isolate': all run on the node that this call runs on. 'numactl': the process's own binding stays as it
             is, by whatever it was set
    root     of the file system, for tests

    Raises PlanError for processors that the process may not use, and where the system cannot bind threads to processors.
    """
    allowed = allowed_cpus()
    usable = sorted(set(allowed if cpus is None else cpus))
    missing = sorted(set(usable) - set(allowed))
    if missing:
        raise PlanError(f"this process may not use processor {missing[0]}; it may use {_ranges(allowed)}")
    places: list[ThreadPlace] = []
    if numa in ("distribute", "isolate"):
        usable, places = _by_node(usable, numa, numa_nodes(root))
    elif cpus is not None:
        places = [ThreadPlace(frozenset(usable))]
    count = threads or len(usable)
    notes = thread_notes(count, len(usable))
    if places:
        problem = _problem(places[0])
        if problem and cpus is not None:
            raise PlanError(f"threads cannot be bound to processors here: {problem}")
        if problem:
            return ThreadPlacement(count, (), (*notes, f"--numa {numa} is without effect: {problem}"))
    return ThreadPlacement(count, tuple(places[i % len(places)] for i in range(count)) if places else (), tuple(notes))


def _by_node(usable: list[int], numa: str, nodes: list[Node]) -> tuple[list[int], list[ThreadPlace]]:
    """The processors and places of threads that are distributed over nodes, or isolated on one."""
    by_node = [(node.number, frozenset(node.cpus) & frozenset(usable)) for node in nodes]
    by_node = [(number, cpus) for number, cpus in by_node if cpus] or [(0, frozenset(usable))]
    if numa == "isolate":
        here = current_cpu()
        cpus = next((cpus for _, cpus in by_node if here in cpus), by_node[0][1])
        return sorted(cpus), [ThreadPlace(cpus)]
    numbers = tuple(number for number, _ in by_node)
    return usable, [ThreadPlace(cpus, numbers if len(numbers) > 1 else ()) for _, cpus in by_node]


def _problem(place: ThreadPlace) -> str:
    """Why a thread cannot be placed there; '' if it can."""
    try:
        with place.entered():
            place.enter()
    except OSError as error:
        return error.strerror or str(error)
    return ""


def _ranges(cpus: list[int]) -> str:
    """[0, 1, 2, 5] -> '0-2,5'."""
    parts: list[list[int]] = []
    for cpu in cpus:
        if parts and parts[-1][-1] == cpu - 1:
            parts[-1].append(cpu)
        else:
            parts.append([cpu])
    return ",".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)
