"""`ggufmill plan`: what of a model goes where in memory, and whether it fits."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..convert import open_source
from ..convert.hub.fetch import is_repository
from ..errors import CheckFailed, PlanError, UsageError
from ..formats import TensorSource, TensorType
from ..jobs.outputs import Outputs
from ..jobs.streamed_json import StreamedJson
from ..operating_system.memory import free_bytes
from ..quantize import can_encode
from ..quantize.importance import AssumedImportance
from ..quantize.planning import plan_quantize
from ..quantize.recipes.lint import TERNARY_TYPES
from ..quantize.recipes.mixes import default_type, file_types
from ..quantize.recipes.recipe import Recipe, load_recipe
from ..quantize.recipes.type_selection import INTEGER_TYPES
from ..recipes import find, names
from ..runtime.compute_buffers import Use
from ..runtime.memory import CPU, Placement, TensorOverride, TensorSize, experts_to_cpu, parse_overrides, place
from ..runtime.torch_devices import TorchDevice, accelerators_here, choose_devices
from .common.arguments import FileType, Size, as_bytes, as_file_type, refuse_unused
from .common.losses import warn_of_losses
from .common.messages import warn
from .common.programs import layout_for, program_of

if TYPE_CHECKING:
    from ..jobs.plan import Plan
    from .cluster.forecast import ClusterForecast

MIB = 1 << 20
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


def plan_memory(
    model: str | Path,
    *,
    ram: Size | None = None,
    vram: Size | Sequence[Size] = (),
    device: str | Sequence[str] | None = None,
    n_ctx: int = 32768,
    ubatch: int = 512,
    cache_k: str | None = None,
    cache_v: str | None = None,
    mla: int | None = None,
    flash: bool = True,
    attn_max_batch: int | None = None,
    n_gpu_layers: int | None = None,
    override_tensor: str | Sequence[str] = (),
    cpu_moe: bool = False,
    n_cpu_moe: int | None = None,
    tensor_split: Sequence[float] | None = None,
    recipe: str | Path | None = None,
    type: FileType | None = None,
    mla_layout: str | None = None,
    mtp: bool | None = None,
    architecture: str | None = None,
    allow_lossy_config: bool = False,
    program: str | None = None,
    cluster: int | Sequence[int] = (),
    cluster_threads: int | None = None,
    cluster_output: str | None = None,
    read_rate: Size | None = None,
    write_rate: Size | None = None,
    network_rate: Size | None = None,
    encode_rate: float | None = None,
) -> MemoryPlan:
    """What of a model goes where, and whether it fits: weights, KV cache, compute buffers. Devices are filled as in llama.cpp.

    The weights are as `recipe` or `type` would make them; a GGUF that is quantised already counts as it is. For any other model
    without either, every shipped recipe and every file type is tried, and the largest that fits is chosen.

    model             a GGUF file, a checkpoint folder or hf:OWNER/NAME, of which the headers are read
    ram, vram         bytes of the machine's memory (None: not limited), and of each GPU (); numbers or texts such as '24GiB'
    device            devices of torch, as for `load_model`, with the memory that they and the machine have free; None: those
                      that there are, if `vram` is not given and torch is installed
    n_ctx, ubatch     tokens of context, and per pass
    cache_k, cache_v  types of cached keys and values; None: f16
    mla, flash        mode of latent attention (None: 3), and flash attention, whose scores are never stored
    attn_max_batch    MiB that attention's buffer has at most; None: no bound
    n_gpu_layers      layers on the GPUs, the last ones; None: all
    override_tensor   'REGEX=DEVICE,...', devices CPU, CUDA0, CUDA1, ...; the first match wins
    cpu_moe           experts stay in RAM; n_cpu_moe: those of the first n layers
    tensor_split      shares of the GPUs in the layers; None: by their memory
    recipe, type      how the model is to be quantised
    mla_layout, mtp, architecture, allow_lossy_config, program  as for `convert_model`; recipes with types that the program
                      does not know are no candidates

    cluster           numbers of machines, such as (1, 8, 64): how long making the model takes on a cluster of them, simulated
    cluster_threads   of each machine (None: as many as this one has); cluster_output: as for `quantize_model` (None: 'shared')
    read_rate, write_rate, network_rate
                      bytes per second of the storage that machines share, and of each machine's network in one direction
    encode_rate       weights per second of a thread; None: measured here, for each type

    Returns a `MemoryPlan`. Raises PlanError for a rule with a device that is not there, or settings the model cannot have,
    CheckFailed when a device would need more than it has.

    Example:
        >>> from ggufmill import plan_memory
        >>> from ggufmill.recipes import FOLDER
        >>> result = plan_memory(FOLDER / "demo", ram="1GiB", n_ctx=512)
        >>> result.fits, len(result.tried) > 20
        (True, True)
    """
    sizes = (vram,) if isinstance(vram, int | str) else vram
    if sizes and device is not None:
        raise UsageError("--vram and --device: give one of both, sizes or devices that are there")
    capacities: dict[str, int | None] = {CPU: as_bytes(ram), **{f"CUDA{i}": as_bytes(size) for i, size in enumerate(sizes)}}
    if not sizes:
        capacities |= {each.name: each.free for each in _present(device)}
        if device is not None and ram is None:
            capacities[CPU] = free_bytes()
    rules = [override_tensor] if isinstance(override_tensor, str) else override_tensor
    overrides = [rule for text in rules for rule in parse_overrides(text)]
    overrides += experts_to_cpu(n_cpu_moe) if n_cpu_moe is not None else []
    overrides += experts_to_cpu() if cpu_moe else []
    bound = attn_max_batch * MIB if attn_max_batch else None
    split = tuple(tensor_split) if tensor_split is not None else None
    use = Use(n_ctx, ubatch, cache_k, cache_v, mla, flash, attention_bytes=bound, gpu_layers=n_gpu_layers, tensor_split=split)
    mla_layout = layout_for(program, model, mla_layout)
    source = open_source(
        model,
        mla_layout=mla_layout,
        mtp=mtp,
        architecture=architecture,
        allow_lossy_config=allow_lossy_config,
        remote=is_repository(model),
    )
    warn_of_losses(source)
    planner = _Planner(source, use, overrides, capacities, program)
    counts = (cluster,) if isinstance(cluster, int) else tuple(cluster)
    if not counts:
        rates = {"--read-rate": read_rate, "--write-rate": write_rate, "--network-rate": network_rate}
        rates |= {"--encode-rate": encode_rate}
        refuse_unused({"--cluster-threads": cluster_threads, "--cluster-output": cluster_output, **rates}, "--cluster")
    elif min(counts) < 1 or max(counts) > 1000 or (encode_rate is not None and encode_rate <= 0):
        raise PlanError("--cluster takes numbers of machines from 1 to 1000, such as 1,8,64, and --encode-rate one above 0")
    if recipe is not None or type is not None or planner.is_quantised:
        result = MemoryPlan(planner.candidate(recipe, as_file_type(type, "--type")))
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
            threads=cluster_threads,
            output=cluster_output or "shared",
            read_rate=as_bytes(read_rate),
            write_rate=as_bytes(write_rate),
            network_rate=as_bytes(network_rate),
            encode_rate=encode_rate,
        )
    warn(result.chosen.placement.warnings, detail=True)
    if not result.fits:
        what = "nothing fits" if result.tried else "it does not fit"
        advice = "put less on the device that lacks memory, or look for smaller types with `ggufmill search`"
        raise CheckFailed(f"{what}: {advice}", result)
    return result


def _present(device: str | Sequence[str] | None) -> list[TorchDevice]:
    """The devices of these names; None: those that there are, if torch is installed."""
    if device is None:
        return accelerators_here()[0]
    return choose_devices(device.split(",") if isinstance(device, str) else device)


class _Planner:
    """Places the weights of one model, quantised in one way or another."""

    def __init__(
        self,
        source: TensorSource,
        use: Use,
        overrides: Sequence[TensorOverride],
        capacities: dict[str, int | None],
        program: str | None = None,
    ) -> None:
        self.source, self.use, self.overrides, self.capacities = source, use, overrides, capacities
        self.program = program

    @property
    def is_quantised(self) -> bool:
        matrices = (t for t in self.source.tensors.values() if len(t.shape) > 1 and t.source_type not in INTEGER_TYPES)
        return any(t.stored is not None and not t.stored.is_float for t in matrices)

    def candidate(self, recipe: str | Path | None = None, type: TensorType | str | None = None) -> Candidate:
        """The model by that recipe and type; without either as it is. Raises PlanError."""
        loaded = _loaded(recipe)
        default = type or loaded.type
        plan = self._plan(loaded, default)
        placement = place(_Weights(plan.outputs), self.source.metadata, self.use, self.overrides, self.capacities)
        name = default.name if isinstance(default, TensorType) else default
        label = str(recipe) if recipe is not None else name if name is not None else "as it is"
        unmatched = [w for w in plan.warnings if "matches no tensor" in w] if recipe is not None else []
        placement.warnings += unmatched
        made_by = recipe, type
        return Candidate(label, plan.total_bytes, plan.bits_per_weight, placement, plan.outputs, bool(unmatched), made_by)

    def plan_of(self, candidate: Candidate) -> Plan:
        """The plan of making it."""
        recipe, type = candidate.made_by
        loaded = _loaded(recipe)
        return self._plan(loaded, type or loaded.type)

    def made_again(self, candidate: Candidate) -> Candidate:
        """One of `all_candidates`, with its tensors."""
        return self.candidate(*candidate.made_by)

    def _plan(self, recipe: Recipe, type: TensorType | str | None) -> Plan:
        return plan_quantize(
            self.source,
            "out.gguf",
            type=type,
            rules=recipe.rules,
            importance=AssumedImportance({}),
            ignore_imatrix_rules=True,
            allow_requantize=True,
            program=program_of(recipe, self.program),
        )

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
            if can_encode(first) and first.rows == 1 and first.name not in _NOT_OFFERED:
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


def _loaded(recipe: str | Path | None) -> Recipe:
    return load_recipe(find(recipe)) if recipe is not None else Recipe("", [], "")


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
