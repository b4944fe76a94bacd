"""Which devices a model is run on, and what of it lies where: the placement that `plan` shows, made real."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...data_classes import dataclass
from ...formats import TYPES, PlanError, TensorSource
from ...operating_system.memory import free_bytes
from ...request_fields import values_of
from ..backends import Executable
from ..graph import Graph
from ..hparams import HParams
from ..settings import CacheTypes, Settings
from .compute_buffers import Use
from .memory import CPU, Placement, TensorSize, layer_number, overrides_of, place
from .torch_devices import TorchDevice, accelerators_here, choose_devices, import_torch

if TYPE_CHECKING:
    from ..backends.cpu.weights import WeightStore

# Settings that say where weights go, and the options that they come from.
_RULES = {
    "gpu_layers": "-ngl",
    "override_tensor": "-ot",
    "cpu_moe": "--cpu-moe",
    "n_cpu_moe": "--n-cpu-moe",
    "tensor_split": "--tensor-split",
    "main_gpu": "-mg",
    "device_memory": "--device-memory",
}


@dataclass(frozen=True)
class DevicePlacement:
    """placement: what goes where; devices: those of torch, by the names that the placement has for them."""

    placement: Placement
    devices: Mapping[str, TorchDevice]

    @property
    def on_host(self) -> set[str]:
        """Names of the tensors that stay in the machine's memory."""
        return {name for name, (device, _) in self.placement.places.items() if device == CPU}


def place_model(source: TensorSource, settings: Settings) -> tuple[DevicePlacement | None, list[str]]:
    """Where a model goes with these settings (None: to no device, it runs on the cpu backend alone), and what the user should
    know of it, one line each.

    Without `device` but with a rule that says where weights go, all accelerators that torch finds are used; where there are
    none, rules are without effect, so that one command line serves all machines. Raises PlanError for devices that are named
    but not there, and for rules that cannot be read or that have nothing to act on.
    """
    given = [option for name, option in _RULES.items() if getattr(settings, name) not in (None, (), False)]
    if settings.device is None and (not given or settings.gpu_layers == 0):
        return None, []
    overrides = overrides_of(settings)
    devices = choose_devices(settings.device or ("auto",))
    if not devices and settings.device in (None, ("auto",)):
        elsewhere = next((rule for rule in overrides if rule.device != CPU), None)
        why = accelerators_here()[1]
        if elsewhere is not None:
            raise PlanError(f"-ot {elsewhere}: there is no {elsewhere.device}; {why}")
        options = ", ".join(given if settings.device is None else ["--device auto", *given])
        return None, [f"{options} without effect: {why}, the model runs on the processor"]
    if settings.main_gpu is not None:
        if settings.main_gpu >= len(devices):
            raise PlanError(f"-mg {settings.main_gpu}: there are {len(devices)} devices, which count from 0")
        devices = [devices[settings.main_gpu]]
    if not devices:
        return None, []
    use = _use(source, settings)
    capacities = {CPU: free_bytes(), **{device.name: device.free for device in devices}}
    placement = place(_weights(source), source.metadata, use, overrides, capacities)
    return DevicePlacement(placement, {device.name: device for device in devices}), placement.warnings


def needed_bytes(source: TensorSource, settings: Settings) -> int:
    """Bytes of memory that a model takes on the processor with these settings when all of its context is used by as many
    sequences as are decoded at once: weights, caches, buffers. Raises PlanError and FormatError as `load_model`."""
    placed = place(_weights(source), source.metadata, _use(source, settings), [], {CPU: None}).devices[0]
    return placed.weights + placed.compute + settings.parallel * placed.cache


def _use(source: TensorSource, settings: Settings) -> Use:
    """How a model is run with these settings, as the planning of memory has it."""
    hparams = HParams(source.metadata, source.path)
    return Use(
        settings.n_ctx or hparams.int("context_length", 4096),
        settings.ubatch,
        settings.mla if hparams.is_latent else None,
        settings.flash,
        settings.attention_bytes,
        settings.gpu_layers,
        settings.tensor_split,
        **values_of(settings, CacheTypes),
    )


def _weights(source: TensorSource) -> list[TensorSize]:
    """The tensors as they lie on a device; of types that only checkpoints have, as bf16."""
    out = []
    for name, tensor in source.tensors.items():
        kind = tensor.stored if tensor.stored is not None and tensor.stored.is_known else TYPES["bf16"]
        out.append(TensorSize(name, kind, kind.nbytes(tensor.shape)))
    return out


def _streamed(placement: Placement, source: TensorSource, limit: int | None) -> list[str]:
    """The tensors that are copied to their device for each use, so that those which stay there and the largest layer of these
    take at most `limit` bytes of it: the last layers, and before all others the output stays.

    Raises PlanError where a layer alone is larger.
    """
    out: list[str] = []
    for device in {device for device, _ in placement.places.values()} - {CPU} if limit is not None else ():
        layers: dict[int, list[TensorSize]] = {}
        for weight in _weights(source):
            if placement.places[weight.name][0] == device:
                layers.setdefault(layer_number(weight.name), []).append(weight)
        sizes = {number: sum(weight.nbytes for weight in layers[number]) for number in sorted(layers)}
        assert limit is not None
        left = limit - (max(sizes.values()) if sum(sizes.values()) > limit else 0)
        if left < 0:
            raise PlanError(f"--device-memory {limit:,} bytes: the largest layer on {device} takes {max(sizes.values()):,}")
        for number, size in sizes.items():
            left -= size
            out += [weight.name for weight in layers[number]] if left < 0 else []
    return out


def device_compiler(
    placed: DevicePlacement, source: TensorSource, store: WeightStore, settings: Settings
) -> Callable[[Graph], Executable]:
    """What compiles graphs of a model for its devices. source: the weights; store: the same for the cpu backend."""
    torch = import_torch("--device")
    from ..backends.torch.executable import compile_graph
    from ..backends.torch.op_places import HOST, Places
    from ..backends.torch.weights import Weights

    where = {CPU: HOST, **{name: torch.device(device.torch_name) for name, device in placed.devices.items()}}
    placement = placed.placement
    homes = {name: where[device] for name, (device, _) in placement.places.items()}
    layers = {number: where[device] for number, device in placement.layers.items()}
    tied = where[placement.tied_output] if placement.tied_output else HOST
    if any(device.torch_name == "cpu" for device in placed.devices.values()):
        torch.set_num_threads(store.workers.count)
    stay: dict[str, Any] = {name: home or torch.device("cpu") for name, home in homes.items()}
    stay |= dict.fromkeys(_streamed(placement, source, settings.device_memory))
    weights = Weights(source, stay, settings.exact)
    places = Places(homes, layers, HOST, tied)
    return lambda graph: compile_graph(graph, weights, store, settings, places)
