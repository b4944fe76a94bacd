"""How large a model's file may be so that weights, cache and buffers fit into a machine, and how it is run there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from ...data_classes import dataclass
from ...errors import PlanError
from ...formats import TensorSource
from ...jobs.plan import Plan
from ...operating_system.memory import total_bytes
from ...request_fields import values_of, words_of
from ...runtime.hparams import HParams
from ...runtime.placement.compute_buffers import Use
from ...runtime.placement.memory import CPU, Placement, TensorSize, overrides_of, place
from ...runtime.placement.torch_devices import accelerators_here
from ...runtime.settings import CacheTypes, LayerPlacement
from ..common.arguments import as_bytes
from ..common.figures import size_text
from ..common.messages import note
from ..requests.make import MakeRequest

MACHINE_SHARE, DEVICE_SHARE = 0.9, 0.94  # of memory that this machine has: the rest is for the system and other programs
_STEPS = 16  # of bisecting the size


@dataclass(frozen=True)
class Fit:
    """What the file may take.

    nbytes      of the file, at most
    why         where that comes from, in words
    use         how the model is run
    capacities  CPU, CUDA0, ... -> bytes
    """

    nbytes: int
    why: str
    use: Use
    capacities: Mapping[str, int | None]


def find_fit(request: MakeRequest, source: TensorSource, largest: Plan) -> Fit:
    """The size that is asked for, or the one with which the model fits into the memory that is given, or this machine's.

    largest: the plan of the model in the largest types that are worth it, whose size is the most that is taken where memory
    decides. Raises PlanError where not even the cache fits.
    """
    capacities, where = _capacities(request)
    trained = HParams(source.metadata, source.path).int("context_length", request.n_ctx)
    use = Use(min(request.n_ctx, trained), **values_of(request, CacheTypes))
    if request.fit is not None:
        nbytes = as_bytes(request.fit)
        assert nbytes is not None
        if nbytes > largest.file_bytes and request.types is None:
            why = f"{size_text(nbytes)} asked for, of which no more would be better"
            return Fit(largest.file_bytes, why, use, capacities)
        return Fit(nbytes, "asked for", use, capacities)
    sizes = [TensorSize(name, kind.type, kind.nbytes) for name, kind in largest.outputs.entries()]
    share = _largest_share(sizes, source.metadata, use, capacities)
    context = f"beside the cache and buffers of {use.n_ctx:,} tokens"
    if share == 1:
        return Fit(largest.file_bytes, f"more would not be better: it fits {where} {context}", use, capacities)
    nbytes = sum(each.nbytes for each in _scaled(sizes, share))
    return Fit(nbytes, f"what fits {where} {context}", use, capacities)


def working_type(source: TensorSource, largest: Plan) -> str | None:
    """The type of a copy that is to run in place of a source which this machine's memory does not hold; None: it does, or a
    copy would not be smaller. largest: the plan of the model in q8_0."""
    total, bf16 = total_bytes(), 2 * sum(tensor.n_elements for tensor in source.tensors.values())
    nbytes = max(bf16, sum(path.stat().st_size for path in source.files))  # fp8 is decoded again in each pass
    if total is None or nbytes < MACHINE_SHARE * total or largest.file_bytes >= nbytes:
        return None
    note(
        f"note: the model takes {size_text(nbytes)} in bf16, this machine has {size_text(total)} of memory: a copy in q8_0 "
        f"({size_text(largest.file_bytes)}) runs in its place; the file is quantised from the model itself"
    )
    return "q8_0"


def run_options(sizes: Sequence[TensorSize], metadata: Mapping[str, Any], fit: Fit) -> list[str] | None:
    """Options of llama.cpp's programs, and of this one's, with which a file with these tensors fits; None: it does not."""
    found = _placed(sizes, metadata, fit.use, fit.capacities)
    if found is None:
        return None
    given = words_of(CacheTypes, values_of(fit.use, CacheTypes))
    return ["-c", str(fit.use.n_ctx), *given, *found]


def _capacities(request: MakeRequest) -> tuple[dict[str, int | None], str]:
    """Bytes of each device, and what has them in words. Raises PlanError where the system does not say."""
    sizes = [request.vram] if isinstance(request.vram, int | str) else list(request.vram)
    if request.ram is not None or sizes:
        given: dict[str, int | None] = {CPU: as_bytes(request.ram)}
        given |= {f"CUDA{i}": as_bytes(size) for i, size in enumerate(sizes)}
        return given, " and ".join(
            f"{size_text(size)} of {'RAM' if name == CPU else name}" for name, size in given.items() if size
        )
    total = total_bytes()
    if total is None:
        if request.fit is not None:
            return {CPU: None}, "this machine"
        raise PlanError("the system does not say how much memory this machine has: give --fit SIZE, or --ram SIZE")
    here: dict[str, int | None] = {CPU: int(MACHINE_SHARE * total)}
    here |= {each.name: int(DEVICE_SHARE * each.total) for each in accelerators_here()[0] if each.total is not None}
    return here, "this machine's " + " and ".join(
        f"{size_text(size or 0)} of {'RAM' if name == CPU else name}" for name, size in here.items()
    )


def _scaled(sizes: Sequence[TensorSize], share: float) -> list[TensorSize]:
    """The tensors with this share of the bytes of those that are quantised."""
    return [each if each.type.name == "f32" else replace(each, nbytes=int(share * each.nbytes)) for each in sizes]


def _largest_share(
    sizes: Sequence[TensorSize], metadata: Mapping[str, Any], use: Use, capacities: Mapping[str, int | None]
) -> float:
    """The largest share of these tensors that fits, 1 for all of it. Raises PlanError if nothing does."""

    def fits(share: float) -> bool:
        return _placed(_scaled(sizes, share), metadata, use, capacities) is not None

    if fits(1):
        return 1.0
    if not fits(0):
        placement = place(_scaled(sizes, 0), metadata, use, [], capacities)
        lacking = "; ".join(text for text in placement.warnings if " lacks " in text)
        raise PlanError(
            f"without any weights a cache of {use.n_ctx:,} tokens and its buffers do not fit ({lacking}): ask for a shorter "
            "context (-c), or smaller types of cache (-ctk, -ctv)"
        )
    low, high = 0.0, 1.0
    for _ in range(_STEPS):
        middle = (low + high) / 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _placed(
    sizes: Sequence[TensorSize], metadata: Mapping[str, Any], use: Use, capacities: Mapping[str, int | None]
) -> list[str] | None:
    """How tensors of these sizes fit, as options: everything on the GPUs if they hold it, else as few layers' experts in RAM as
    can be, and then as few layers. None: not at all."""
    layers = HParams(dict(metadata), "the model").size("block_count")
    has_experts = any("_exps" in each.name for each in sizes)

    def tried(count: int) -> Placement:
        """With the experts of the first `count` layers in RAM, if there are experts, and beyond these that many layers."""
        experts, whole = divided(count)
        overrides = overrides_of(LayerPlacement(n_cpu_moe=experts))
        gpu_layers = layers + 1 - whole if whole else None
        return place(sizes, metadata, replace(use, gpu_layers=gpu_layers), overrides, capacities)

    def divided(count: int) -> tuple[int, int]:
        experts = min(count, layers) if has_experts else 0
        return experts, count - experts

    has_gpu = len(capacities) > 1
    low, high = 0, (layers * (1 + has_experts) + 1) * has_gpu
    while low < high:  # the least of them that leaves the GPUs enough; RAM has to hold the others
        middle = (low + high) // 2
        enough = all(each.free is None or each.free >= 0 for each in tried(middle).devices if each.name != CPU)
        low, high = (low, middle) if enough else (middle + 1, high)
    if not tried(low).fits:
        return None
    if not has_gpu:
        return []
    experts, whole = divided(low)
    return ["-ngl", str(layers + 1 - whole), *(["--n-cpu-moe", str(experts)] if experts else [])]
