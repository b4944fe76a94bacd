"""`ggufmill plan`: what of a model goes where in memory, and whether it fits."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..data_classes import dataclass
from ..errors import CheckFailed, PlanError, UsageError
from ..formats import TensorSource, TensorType
from ..jobs.outputs import Outputs
from ..jobs.streamed_json import StreamedJson
from ..operating_system.memory import free_bytes
from ..quantize.importance import AssumedImportance
from ..quantize.planning import outputs_of
from ..quantize.recipes.lint import TERNARY_TYPES
from ..quantize.recipes.mixes import default_type, file_types
from ..quantize.recipes.type_selection import INTEGER_TYPES
from ..recipes import names
from ..request_fields import fields_of, shared, values_of
from ..runtime.placement.compute_buffers import Use
from ..runtime.placement.memory import CPU, Placement, RunMemory, TensorPlaces, TensorSize, overrides_of, place
from ..runtime.placement.torch_devices import TorchDevice, accelerators_here, choose_devices
from ..runtime.settings import CacheTypes
from .common.arguments import as_bytes, as_file_type, refuse_unused
from .common.dropped_config import warn_on_dropped_config
from .common.messages import warn
from .common.shown import shown
from .planning import Quantization
from .requests.groups import reading_of
from .requests.plan import ForecastOptions, PlanRequest
from .requests.quantize import QuantizeRequest
from .requests.verb import verb

if TYPE_CHECKING:
    from ..jobs.plan import Plan
    from .cluster.forecast import ClusterForecast

MIB = 1 << 20
_IMPORTANCE = AssumedImportance({})
_NOT_OFFERED = ("q1_0_g128", *TERNARY_TYPES)  # types for models that were trained in them


@dataclass
class Candidate:
    """A way to quantise the model, and where everything would lie then.

    recipe   the recipe's or file type's name, or 'as it is'
    nbytes   of all weights; bits per weight
    outputs  the tensors with their types
    foreign  whether the recipe has rules that match no tensor: it is for another model
    made_by  the arguments of `_Planner.candidate`: recipe and type
    """

    recipe: str
    nbytes: int
    bits_per_weight: float
    placement: Placement
    outputs: Outputs
    foreign: bool
    made_by: tuple[str | Path | None, TensorType | str | None]

    def as_json(self) -> dict[str, Any]:
        return {"recipe": self.recipe, "total_bytes": self.nbytes, "bits_per_weight": self.bits_per_weight}


@shown
@dataclass
class MemoryPlan(StreamedJson):
    """The candidate that was chosen, and those that were tried, largest first and without their tensors (none if a recipe or
    type was given).

    cluster: what making it takes on several machines, if that was asked for
    """

    chosen: Candidate
    tried: list[Candidate] = field(default_factory=list)
    cluster: ClusterForecast | None = None

    @property
    def fits(self) -> bool:
        return self.chosen.placement.fits

    def json_fields(self) -> dict[str, Any]:
        """What --json prints: recipe, total_bytes, bits_per_weight, devices, rules, tensors, fits, warnings, candidates, and
        cluster if it was asked for."""
        candidates = [candidate.as_json() | {"fits": candidate.placement.fits} for candidate in self.tried]
        cluster = {"cluster": self.cluster.as_json()} if self.cluster is not None else {}
        return {**self.chosen.as_json(), **self.chosen.placement.json_fields(), "candidates": candidates, **cluster}


@verb(PlanRequest)
def plan_memory(request: PlanRequest) -> MemoryPlan:
    """What of a model goes where, and whether it fits: weights, KV cache, compute buffers. Devices are filled as in llama.cpp.

    The weights are as `recipe` or `type` would make them; a GGUF that is quantised already counts as it is. For any other model
    without either, every bundled recipe and every file type is tried, and the largest that fits is chosen; recipes with types
    that `program` does not know are no candidates.

    Returns a `MemoryPlan`. Raises PlanError for a rule with a device that is not there, or settings the model cannot have,
    CheckFailed when a device would need more than it has.

    Example:
        >>> from ggufmill import plan_memory
        >>> from ggufmill.recipes import FOLDER
        >>> result = plan_memory(FOLDER / "demo", ram="1GiB", n_ctx=512)
        >>> result.fits, len(result.tried) > 20
        (True, True)
    """
    counts = _machines(request)
    planner = _Planner(request)
    if request.recipe is not None or request.type is not None or planner.is_quantised:
        result = MemoryPlan(planner.candidate(request.recipe, as_file_type(request.type, "--type")))
    else:
        tried = planner.all_candidates()
        fitting = [candidate for candidate in tried if candidate.placement.fits]
        best = max(fitting or tried, key=lambda c: (c.nbytes if c.placement.fits else -c.nbytes, c.recipe))
        result = MemoryPlan(planner.made_again(best), tried)
    if counts:
        from .cluster.forecast import forecast_cluster

        result.cluster = forecast_cluster(
            planner.plan_of(result.chosen),
            counts,
            threads=request.cluster_threads,
            output=request.cluster_output or "shared",
            read_rate=as_bytes(request.read_rate),
            write_rate=as_bytes(request.write_rate),
            network_rate=as_bytes(request.network_rate),
            encode_rate=request.encode_rate,
        )
    warn(result.chosen.placement.warnings, detail=True)
    if not result.fits:
        what = "nothing fits" if result.tried else "it does not fit"
        advice = "put less on the device that lacks memory, or look for smaller types with `ggufmill search`"
        raise CheckFailed(f"{what}: {advice}", result)
    return result


def _machines(request: PlanRequest) -> tuple[int, ...]:
    """The numbers of machines to forecast for. Raises UsageError for arguments that need some, PlanError for wrong ones."""
    counts = (request.cluster,) if isinstance(request.cluster, int) else tuple(request.cluster)
    if not counts:
        refuse_unused(request, "--cluster", *(field.name for field in fields_of(ForecastOptions) if field.name != "cluster"))
    elif min(counts) < 1 or max(counts) > 1000 or (request.encode_rate is not None and request.encode_rate <= 0):
        raise PlanError("--cluster takes numbers of machines from 1 to 1000, such as 1,8,64, and --encode-rate one above 0")
    return counts


def _capacities(request: PlanRequest) -> dict[str, int | None]:
    """Bytes of each device; None: not limited. Raises UsageError for both sizes and devices."""
    sizes = (request.vram,) if isinstance(request.vram, int | str) else request.vram
    if sizes and request.device is not None:
        raise UsageError("--vram has sizes of GPUs, --device those that this machine has: give one of the two")
    capacities = {CPU: as_bytes(request.ram), **{f"CUDA{i}": as_bytes(size) for i, size in enumerate(sizes)}}
    if not sizes:
        capacities |= {each.name: each.free for each in _present(request.device)}
        if request.device is not None and request.ram is None:
            capacities[CPU] = free_bytes()
    return capacities


def _use(request: PlanRequest) -> Use:
    """How the model is run."""
    bound = request.attn_max_batch * MIB if request.attn_max_batch else None
    how = request.n_ctx, request.ubatch, request.mla, request.flash, bound, request.gpu_layers, request.tensor_split
    return Use(*how, **values_of(request, CacheTypes))


def _present(device: str | Sequence[str] | None) -> list[TorchDevice]:
    """The devices of these names; None: those that there are, if torch is installed."""
    if device is None:
        return accelerators_here()[0]
    return choose_devices(device.split(",") if isinstance(device, str) else device)


class _Planner:
    """Places the weights of one model, quantised in one way or another."""

    def __init__(self, request: PlanRequest) -> None:
        self.request, self.capacities = request, _capacities(request)
        self.overrides, self.use = overrides_of(request), _use(request)
        self._sources: dict[str, TensorSource] = {}
        self._known: dict[int, tuple[RunMemory, TensorPlaces]] = {}  # by the id of the source
        self.source = self._job(request.recipe, None).source
        warn_on_dropped_config(self.source)

    def _job(self, recipe: str | Path | None, type: TensorType | str | None) -> Quantization:
        """The model by that recipe and type, with importance data for every tensor assumed."""
        fixed = {"out": "out.gguf", "cluster": None, "cluster_output": None, "device": None, "dry_run": True}
        given = {"recipe": recipe, "type": type, "ignore_imatrix_rules": True, "allow_requantize": True}
        job = Quantization(shared(self.request, QuantizeRequest, source=self.request.model, **fixed, **given), is_written=False)
        reading = repr(reading_of(job.request))  # most recipes read the model alike
        if reading in self._sources:
            job.source = self._sources[reading]
        self._sources[reading] = job.source
        job.importance = _IMPORTANCE
        return job

    @property
    def is_quantised(self) -> bool:
        matrices = (t for t in self.source.tensors.values() if len(t.shape) > 1 and t.source_type not in INTEGER_TYPES)
        return any(t.stored is not None and not t.stored.is_float for t in matrices)

    def candidate(self, recipe: str | Path | None = None, type: TensorType | str | None = None) -> Candidate:
        """The model by that recipe and type; without either as it is. Raises PlanError."""
        if type is not None and recipe is None and self.request.program is None:  # as most are
            source, outputs, unmatched = self.source, outputs_of(self.source, type, _IMPORTANCE), []
        else:
            job = self._job(recipe, type)
            source, plan = job.source, job.plan()
            outputs = plan.outputs
            unmatched = [w for w in plan.warnings if "matches no tensor" in w] if recipe is not None else []
        placement = self._placement(source, outputs)
        placement.warnings += unmatched
        name = type.name if isinstance(type, TensorType) else type
        label = str(recipe) if recipe is not None else name if name is not None else "as it is"
        nbytes, bits = outputs.total_bytes, outputs.bits_per_weight
        return Candidate(label, nbytes, bits, placement, outputs, bool(unmatched), (recipe, type))

    def _placement(self, source: TensorSource, outputs: Outputs) -> Placement:
        """Where the tensors lie: names and memory to run are mostly the same for all candidates."""
        how = source.metadata, self.use, self.overrides, self.capacities
        if id(source) not in self._known:
            running = RunMemory.of(source.metadata, self.use, set(outputs.names), len(self.capacities) > 1)
            self._known[id(source)] = running, TensorPlaces.of(outputs.names, *how)
        running, where = self._known[id(source)]
        if [*where.places] != outputs.names:
            where = TensorPlaces.of(outputs.names, *how)
        return place(_Weights(outputs), *how, running, where)

    def plan_of(self, candidate: Candidate) -> Plan:
        """The plan of making it."""
        return self._job(*candidate.made_by).plan()

    def made_again(self, candidate: Candidate) -> Candidate:
        """One of `all_candidates`, with its tensors."""
        return self.candidate(*candidate.made_by)

    def all_candidates(self) -> list[Candidate]:
        """Every shipped recipe whose rules all match something, and every file type, largest first: none that is larger than
        the model as it is, nor as large with other types. Their tensors are left out: there may be a million."""
        as_it_is = self.candidate()
        types, same, smaller = _types(as_it_is), list[Candidate](), list[Candidate]()

        def add(candidate: Candidate) -> None:
            if _types(candidate) == types:
                same.append(_without_tensors(candidate))
            if candidate.nbytes < as_it_is.nbytes:
                smaller.append(_without_tensors(candidate))

        for name in names():
            if name.endswith(".txt"):
                try:
                    candidate = self.candidate(name)
                except PlanError:  # types that the program does not know
                    continue
                if not candidate.foreign:
                    add(candidate)
        for name in file_types():
            first = default_type(name)
            if first.has_codec and first.rows == 1 and first.name not in _NOT_OFFERED:
                try:
                    add(self.candidate(type=name))
                except PlanError:
                    continue
        return sorted((same or [_without_tensors(as_it_is)]) + smaller, key=lambda c: (-c.nbytes, c.recipe))


def _types(candidate: Candidate) -> bytes:
    """A digest of the type and size of each of its tensors."""
    columns = candidate.outputs.each(lambda kind: kind.type.id), candidate.outputs.each(lambda kind: kind.nbytes)
    return hashlib.sha256(b"".join(column.tobytes() for column in columns)).digest()


def _without_tensors(candidate: Candidate) -> Candidate:
    return replace(candidate, outputs=Outputs(), placement=replace(candidate.placement, places={}))


class _Weights(Collection[TensorSize]):
    """The tensors of a plan as `place` takes them, made as they are read."""

    def __init__(self, outputs: Outputs):
        self._outputs = outputs

    def __iter__(self) -> Iterator[TensorSize]:
        sizes = self._outputs.each(lambda kind: kind.nbytes).data
        return (TensorSize(name, kind.type, n) for (name, kind), n in zip(self._outputs.entries(), sizes, strict=True))

    def __len__(self) -> int:
        return len(self._outputs)

    def __contains__(self, weight: object) -> bool:
        return any(weight == each for each in self)
