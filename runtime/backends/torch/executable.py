"""A graph on devices of torch, op by op; runs of ops on the host are computed by the cpu backend."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....formats import PlanError
from ....simd.workers import Workers
from ...cache_layout import graph_layers
from ...graph import Graph, Observer, Op, Value, Weight, check_support, ops
from ...graph.signatures import unsupported
from ...settings import Settings
from .. import Executable, PassInputs, last_rows
from ..cpu.kernels.gemv_plan import GEMV_TOKENS
from ..cpu.weights import WeightStore
from ..reference.fallback import note_fallback
from ..reference.functions import FUNCTIONS as REFERENCE_FUNCTIONS
from ..reference.functions import SUPPORT as REFERENCE_SUPPORT
from ..reference.reference_pass import ReferencePass
from .cache import FLOATS, DeviceCache
from .device_pass import DevicePass, Result, to_numpy
from .fixed_pass import FixedPass, FixedPasses
from .functions import FUNCTIONS, PACKED, SUPPORT, is_fixed
from .host_segment import HostSegment, state_layer
from .op_places import Places
from .weights import Weights

_FOLLOWERS = 8  # ops, at most, that are looked at from one
FIXED_DEVICES = ("cuda",)  # where passes over few tokens are recorded

_Unit = HostSegment | tuple[torch.device, Op]


def compile_graph(graph: Graph, weights: Weights, store: WeightStore, settings: Settings, places: Places) -> TorchExecutable:
    """Compiles a graph. weights: on devices; store: the same for the cpu backend; places: what runs where.

    Raises PlanError for an op, an option of one, or a setting that is not known.
    """
    return TorchExecutable(graph, weights, store, settings, places)


class TorchExecutable(Executable):
    """A graph that can be run. observer: what inputs and outputs of ops are reported to; None: nothing."""

    def __init__(self, graph: Graph, weights: Weights, store: WeightStore, settings: Settings, places: Places):
        check_support(graph, "torch", REFERENCE_SUPPORT)
        if settings.expert_reduction is not None and not any(isinstance(op, ops.Route) for op in graph.ops):
            keep, share = settings.expert_reduction
            raise PlanError(f"-ser {keep},{share} has no effect: {store.source.path} has no experts")
        self.graph, self.weights, self.store, self.settings, self.places = graph, weights, store, settings, places
        self.hosts: list[HostSegment] = []
        self._known: dict[int, bool] = {}  # by the op's id
        self._behind: dict[tuple[int, int, int], list[Op]] = {}
        self._layer_devices: dict[int, torch.device] = {}
        self._body, self._head = self._units(places, graph.ops), self._units(places, graph.head)
        self._plain, self._observed = graph_layers(graph, settings)
        self._last = {id(units): _last_uses(units) for units in (self._body, self._head)}
        self._readers = Counter(value.index for op in (*graph.ops, *graph.head) for value in op.inputs)
        self._keeping = [host for host in self.hosts if host in self._body]
        self._foreseen: tuple[np.ndarray, np.ndarray] | None = None  # what a pass gave last, and logits of it
        self._passes, self._fixed_body, self._fixed_head = FixedPasses(), self._fixed(self._body), self._fixed(self._head)

    def _units(self, places: Places, members: Sequence[Op]) -> list[_Unit]:
        runs, units = places.runs(self.graph, members), []
        for number, (place, run) in enumerate(runs):
            if place is None:  # the cpu backend's
                later = {value.index for _, rest in runs[number + 1 :] for op in rest for value in op.inputs}
                later |= {value.index for value in (self.graph.hidden, self.graph.logits) if value is not None}
                self.hosts.append(HostSegment(self.graph, run, later, self.store, self.settings))
                units.append(self.hosts[-1])
                continue
            units += [(place, op) for op in run]
            if self.hosts and self.hosts[-1].next_device is None:
                self.hosts[-1].next_device = place
            for layer in map(state_layer, run):
                if layer is not None:
                    self._layer_devices[layer] = place
        return units

    @Executable.observer.setter
    def observer(self, observer: Observer | None) -> None:
        self._observer = observer
        for host in self.hosts:
            host.observe(observer)

    @property
    def workers(self) -> Workers:
        """The threads of the cpu backend."""
        return self.store.workers

    @property
    def decode_batch(self) -> int:
        """Tokens of several sequences that are taken on in one pass. Beyond the cpu backend's, what torch rounds may depend on
        their number."""
        return GEMV_TOKENS

    def embeddings(self, ids: np.ndarray) -> np.ndarray:
        """Rows of the table of embeddings: int [n] -> float32 [n, n_embd]."""
        weight = self.graph.embedding
        return self.store.matrix(weight.name, *weight.shape).lookup(ids)

    def new_cache(self, limit: int) -> DeviceCache:
        """An empty cache for a sequence of at most `limit` tokens."""
        layers = self._plain if self._observer is None else self._observed
        own = {number: layers[number] for number in self._layer_devices if number < len(layers)}
        hosts = [host.new_cache(limit) for host in self._keeping]
        return DeviceCache(own, self._layer_devices, limit, hosts, self.settings.checkpoints)

    def hidden(
        self,
        tokens: np.ndarray,
        caches: Sequence[tuple[DeviceCache, int]],
        inputs: np.ndarray | None = None,
        generated: bool = False,
        last: Sequence[int] | None = None,
    ) -> np.ndarray:
        """One pass, as in the `Executable` of the cpu backend: int [n] -> float32 [n or wanted, n_embd]."""
        rows = last_rows([count for _, count in caches], last)
        if generated and inputs is None and self._fixed_body is not None and self._observer is None:
            out = self._fixed_hidden(np.asarray(tokens, np.int64), caches, *self._fixed_body)
            return out if rows is None else out[rows]
        return self._run_passes([(tokens, caches, inputs)], rows)[0]

    def _fixed(self, units: Sequence[_Unit]) -> tuple[int, torch.device] | None:
        """From which unit on a pass can be recorded, and on which device; None: not, since ops on the host, of another device
        or of other kinds come in between."""
        first = next((number for number, unit in enumerate(units) if not isinstance(unit, HostSegment)), len(units))
        rest = [unit for unit in units[first:] if not isinstance(unit, HostSegment)]
        devices, homes = {device for device, _ in rest}, self.weights.homes
        if len(rest) < len(units) - first or len(devices) != 1 or self.settings.device_memory is not None:
            return None
        device = devices.pop()
        at_home = all(homes.get(weight.name, device) == device for _, op in rest for weight in op.weights)
        rows = [part for layer in self._plain for part in layer.rows.values()]
        if device.type in FIXED_DEVICES and at_home and all(part.type in FLOATS for part in rows):
            return (first, device) if all(is_fixed(op) for _, op in rest) else None
        return None

    def _fixed_hidden(
        self, tokens: np.ndarray, caches: Sequence[tuple[DeviceCache, int]], first: int, device: torch.device
    ) -> np.ndarray:
        """`hidden`, by a pass that is recorded, but for the units before the `first`."""
        for cache, count in caches:
            cache.check_capacity(count)
            cache.reserve(count)
        values: dict[int, Result] = {}
        begun = DevicePass(tokens, caches, Observer(), None, self.settings.expert_reduction)
        self._run(self._body, values, begun, self.graph.hidden, range(first))
        parts = [(self._body, self.graph.hidden, first)]
        if self._fixed_head is not None and self._fixed_head == (0, device) and self.graph.logits is not None:
            parts.append((self._head, self.graph.logits, 0))
        hidden, *logits = self._run_fixed(parts, values, caches, begun.positions, device)
        self._foreseen = (hidden.copy(), logits[0]) if logits else None
        for cache, count in caches:
            cache.commit(count)
        return hidden

    def _run_fixed(
        self,
        parts: Sequence[tuple[list[_Unit], Value, int]],
        values: dict[int, Result],
        caches: Sequence[tuple[DeviceCache, int]],
        positions: np.ndarray,
        device: torch.device,
    ) -> list[np.ndarray]:
        """The results of parts of the graph, each of units from one on, of which the next one goes on with."""

        def compute(step: FixedPass, own: dict[int, Tensor]) -> list[Tensor]:
            made: dict[int, Result] = {**own}
            results = []
            for units, result, first in parts:
                self._run(units, made, step, result, range(first, len(units)))
                results.append(_tensor(made[result.index]))
            return results

        inputs = {number: _tensor(value) for number, value in values.items()}
        step = self._passes.of(caches, inputs, device, len(positions), self.settings.expert_reduction, self.weights.exact)
        return step.run(inputs, positions, compute)

    @property
    def takes_layers_in_turn(self) -> bool:
        return self.settings.device_memory is not None

    def hidden_passes(self, passes: Sequence[PassInputs]) -> list[np.ndarray]:
        """Each layer's ops for all passes before the next layer's, so that weights which are copied to a device are copied once
        for all. What a pass keeps from layer to layer waits in the machine's memory meanwhile."""
        return self._run_passes(passes)

    def _run_passes(self, passes: Sequence[PassInputs], rows: np.ndarray | None = None) -> list[np.ndarray]:
        """As `hidden_passes`; these rows of the results, if not all."""
        observer, settings = self._observer or Observer(), self.settings
        steps = []
        for tokens, caches, inputs in passes:
            for cache, count in caches:
                cache.check_capacity(count)
            ids = np.asarray(tokens, np.int64)
            steps.append(
                DevicePass(
                    ids, caches, observer, inputs, settings.expert_reduction, settings.attention_bytes, self.weights.exact
                )
            )
        values: list[dict[int, Result]] = [{} for _ in passes]
        for part in self._layer_parts():
            with self.weights.visit():
                for step, own in zip(steps, values, strict=True):
                    self._run(self._body, own, step, self.graph.hidden, part)
                    if len(passes) > 1:
                        _park(own, step)
            if self.on_share is not None:
                self.on_share(part.stop / len(self._body))
        for _, caches, _ in passes:
            for cache, count in caches:
                cache.commit(count)
        results = [_tensor(own[self.graph.hidden.index]) for own in values]
        return [to_numpy(result if rows is None else result[torch.from_numpy(rows)]) for result in results]

    def release(self) -> None:
        self._passes.clear()
        self._foreseen = None

    def _layer_parts(self) -> list[range]:
        """The numbers of units, cut behind those that make the residual stream after a layer."""
        ends = {value.index for value in self.graph.layers}
        made = [unit.outputs if isinstance(unit, HostSegment) else unit[1].outputs for unit in self._body]
        cuts = [number + 1 for number, values in enumerate(made) if any(value.index in ends for value in values)]
        return [range(*pair) for pair in pairwise(sorted({0, *cuts, len(self._body)}))]

    def logits(self, hidden: np.ndarray, generated: bool | None = None) -> np.ndarray:
        """float32 [n, n_embd] -> float32 [n, n_vocab]. Raises PlanError for a model without a head."""
        if self.graph.logits is None:
            raise PlanError(f"{self.store.source.path}: {self.graph.architecture} has no output matrix: it predicts no tokens")
        generated = len(hidden) <= GEMV_TOKENS if generated is None else generated
        foreseen, self._foreseen = self._foreseen, None
        if generated and foreseen is not None and self._observer is None and np.array_equal(foreseen[0], hidden):
            return foreseen[1]
        start: dict[int, Result] = {self.graph.hidden.index: torch.from_numpy(np.ascontiguousarray(hidden))}
        if generated and self._fixed_head is not None and self._observer is None and len(hidden) <= GEMV_TOKENS:
            positions = np.zeros(len(hidden), np.int64)
            first, device = self._fixed_head
            return self._run_fixed([(self._head, self.graph.logits, first)], start, [], positions, device)[0]
        step = DevicePass(np.zeros(len(hidden), np.int64), [], self._observer or Observer(), is_exact=self.weights.exact)
        self._run(self._head, start, step, self.graph.logits, range(len(self._head)))
        return to_numpy(_tensor(start[self.graph.logits.index]))

    @torch.inference_mode()
    def _run(self, units: list[_Unit], values: dict[int, Result], step: DevicePass, result: Value, part: range) -> None:
        """Runs the units of these numbers, and leaves those values that are read later, and `result`."""
        last, step.weights, step.readers = self._last[id(units)], self.weights, self._readers
        for number in part:
            unit = units[number]
            if isinstance(unit, HostSegment):
                values.update(unit.run(step, self._keeping.index(unit) if step.segments else 0, values))
            else:
                step.device, step.op = unit
                step.followers = self._followers(units, number, part.stop)
                self._compute(unit[1], step, values)
            for index in [index for index in values if last.get(index, -1) <= number and index != result.index]:
                del values[index]

    def _followers(self, units: list[_Unit], number: int, stop: int) -> list[Op]:
        """A few ops after the one of a unit, as far as they are on its device."""
        if (known := self._behind.get((id(units), number, stop))) is not None:
            return known
        device, found = units[number][0], []  # type: ignore[index]
        for unit in units[number + 1 : min(stop, number + 1 + _FOLLOWERS)]:
            if isinstance(unit, HostSegment) or unit[0] != device:
                break
            found.append(unit[1])
        self._behind[id(units), number, stop] = found
        return found

    def _compute(self, op: Op, step: DevicePass, values: dict[int, Result]) -> None:
        """Runs the op of a step, and adds its results to the values."""
        if not self._is_known(op):
            result = self._compute_on_host(op, step, values)
        else:
            function, names = FUNCTIONS[type(op)]
            result = function(step, **{name: self._argument(op, name, step.device, values) for name in names})
        results = result if isinstance(op, ops.Split) else [result]
        values.update(zip((out.index for out in op.outputs), results, strict=True))
        if step.observer.wants_output(op):
            step.observer.on_output(op, to_numpy(result[1] if isinstance(op, ops.Route) else results[0]))

    def _is_known(self, op: Op) -> bool:
        """Whether there is a function for the op with its options."""
        known = self._known.get(id(op))
        if known is None:
            support = SUPPORT.get(type(op))
            known = self._known[id(op)] = support is not None and unsupported(op, support) is None
        return known

    def _compute_on_host(self, op: Op, step: DevicePass, values: dict[int, Result]) -> Any:
        """What the reference backend's function makes of an op that there is no function for."""
        note_fallback("torch", type(op).__name__)
        function, names = REFERENCE_FUNCTIONS[type(op)]
        host = torch.device("cpu")
        arguments = {name: self._argument(op, name, host, values, packed=False) for name in names}
        arguments = {name: _to_host(value) for name, value in arguments.items()}
        segments = [(cache.history, rows) for cache, rows in step.segments]
        with np.errstate(all="ignore"):
            result = function(ReferencePass(step.tokens, step.positions, segments, step.observer, op, step.inputs), **arguments)
        if isinstance(result, np.ndarray):
            return step.on_device(result)
        return type(result)(map(step.on_device, result))

    def _argument(self, op: Op, name: str, device: torch.device, values: dict[int, Result], packed: bool = True) -> Any:
        """A field of an op: values and weights on its device, whatever else as it is."""
        field = getattr(op, name)
        if isinstance(field, Value) and name != "out":
            found = values[field.index]
            moved = tuple(part.to(device) for part in found) if isinstance(found, tuple) else found.to(device)
            values[field.index] = moved
            return moved
        if isinstance(field, Weight):
            is_packed = packed and name in PACKED[type(op)]
            return (self.weights.matrix if is_packed else self.weights.vector)(field, device)
        return field


def _to_host(value: Any) -> Any:
    """Tensors as arrays of numpy, whatever else as it is."""
    if isinstance(value, tuple) and value and isinstance(value[0], Tensor):
        return tuple(map(to_numpy, value))
    return to_numpy(value) if isinstance(value, Tensor) else value


def _park(values: dict[int, Result], step: DevicePass) -> None:
    """Moves what a pass keeps to the machine's memory."""
    for index, value in values.items():
        values[index] = tuple(part.cpu() for part in value) if isinstance(value, tuple) else value.cpu()
    for cache, _ in step.segments:
        cache.park()


def _tensor(value: Result) -> Tensor:
    assert isinstance(value, Tensor)
    return value


def _last_uses(units: Sequence[_Unit]) -> dict[int, int]:
    """Value index -> number of the last unit that reads it."""
    last: dict[int, int] = {}
    for number, unit in enumerate(units):
        read = unit.inputs if isinstance(unit, HostSegment) else unit[1].inputs
        last |= {value.index: number for value in read}
    return last
