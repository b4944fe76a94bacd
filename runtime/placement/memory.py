"""What a model takes in memory, and where: weights by device, the cache of keys and values, buffers to compute in.

Placement follows llama.cpp: `-ngl` puts the last layers (and beyond them the output) on the GPUs, `-ot regex=DEVICE` overrules
it tensor by tensor, first match first. The cache's formulae are those of ik_llama.cpp with latent attention; buffers are in
`compute_buffers`.

Modules of single architectures are imported where one of them is planned: with their ops they take longer than a plan does.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import field
from typing import Any

from ...data_classes import dataclass
from ...formats import PlanError, TensorType
from ...formats.metadata_values import MAX_LAYERS
from ...jobs.patterns import NamePattern, compile_pattern
from ...jobs.streamed_json import StreamedJson
from ..cache_layout import CachePart, StatePart, entry_parts, grouped_parts, latent_parts
from ..hparams import HParams, n_layers
from ..models.attention import Heads
from ..models.latent_attention import LatentHeads
from ..models.recurrent.layers import keeps_rows, layer_states
from ..settings import LayerPlacement, Settings
from .compute_buffers import Use, compute_bytes, of_layer, processor_bytes, sequence_length

CPU = "CPU"
MIB = 1 << 20
_COMPRESSED = "deepseek4"  # the architecture whose layers keep a window and entries
_SHARING = ("gemma3n", "gemma4")  # architectures whose last layers use the keys and values of earlier ones


@dataclass(frozen=True, slots=True)
class TensorSize:
    """A tensor as it will lie in the file."""

    name: str
    type: TensorType
    nbytes: int


@dataclass(frozen=True)
class TensorOverride:
    """`regex=DEVICE` of -ot, or what another option stands for; shown as it was given. origin: the option."""

    pattern: NamePattern
    device: str
    origin: str

    def __str__(self) -> str:
        return self.origin if self.origin.startswith("--") else f"{self.pattern.text}={self.device}"


_PAIR = r"(?i)=\s*(CPU|(?:CUDA|XPU|MPS|TORCH):?\d+)\s*(?:,|$)"


def parse_overrides(text: str, origin: str = "-ot") -> list[TensorOverride]:
    """'exps=CPU,attn_kv_b=CUDA0' as llama.cpp's -ot takes it; a comma within a regex is no end. Raises PlanError."""
    overrides, at = [], 0
    while text[at:].strip():
        end = re.compile(_PAIR).search(text, at)
        pattern = text[at : end.start()].strip() if end is not None else ""
        if end is None or not pattern:
            raise PlanError(f"{origin}: {text[at:].strip()[:60]!r} is not `regex=CPU` or `regex=CUDA0`")
        overrides.append(TensorOverride(compile_pattern(pattern, origin), end[1].upper().replace(":", ""), origin))
        at = end.end()
    return overrides


def overrides_of(rules: LayerPlacement) -> list[TensorOverride]:
    """Which tensors lie where whatever the layers do: `-ot`, then `--n-cpu-moe`, then `--cpu-moe`. Raises PlanError for a text
    that says no such thing."""
    texts = [rules.override_tensor] if isinstance(rules.override_tensor, str) else rules.override_tensor
    overrides = [rule for text in texts for rule in parse_overrides(text)]
    overrides += _experts_to_cpu(rules.n_cpu_moe) if rules.n_cpu_moe is not None else []
    return overrides + (_experts_to_cpu() if rules.cpu_moe else [])


def _experts_to_cpu(layers: int | None = None) -> list[TensorOverride]:
    """What --cpu-moe (None) and --n-cpu-moe N stand for: the experts of all layers, or of the first N, stay in RAM."""
    if layers is None:
        return [TensorOverride(NamePattern(r"ffn_(up|down|gate|gate_up)_(ch|)exps"), CPU, "--cpu-moe")]
    which = "|".join(map(str, range(layers)))
    pattern = NamePattern(rf"blk\.({which})\.ffn_(up|down|gate|gate_up)_(ch|)exps")
    return [TensorOverride(pattern, CPU, f"--n-cpu-moe {layers}")] if layers else []


@dataclass
class Device:
    """Bytes on one device. capacity None: not said."""

    name: str
    capacity: int | None
    weights: int = 0
    cache: int = 0
    compute: int = 0
    tensors: int = 0

    @property
    def total(self) -> int:
        return self.weights + self.cache + self.compute

    @property
    def free(self) -> int | None:
        return None if self.capacity is None else self.capacity - self.total


@dataclass
class Placement(StreamedJson):
    """What goes where, tensor name -> (device, what decided it); warnings for people.

    hits        override -> (tensors, bytes)
    layers      layer -> the device of its cache and its operations without weights; the number after the last: the output's
    tied_output the device of the copy of the embeddings that serves as output matrix; '': there is none
    """

    devices: list[Device]
    places: dict[str, tuple[str, str]]
    hits: dict[str, tuple[int, int]]
    layers: dict[int, str]
    tied_output: str = ""
    warnings: list[str] = field(default_factory=list)

    @property
    def fits(self) -> bool:
        return all(device.free is None or device.free >= 0 for device in self.devices)

    def json_fields(self) -> dict[str, Any]:
        return {
            "devices": [vars(d) | {"total": d.total, "free": d.free} for d in self.devices],
            "rules": [{"rule": rule, "tensors": n, "nbytes": size} for rule, (n, size) in self.hits.items()],
            "tensors": ({"name": name, "device": device, "rule": rule} for name, (device, rule) in self.places.items()),
            "fits": self.fits,
            "warnings": self.warnings,
        }


def cache_token_bytes(metadata: Mapping[str, Any], use: Use, layer: int = 0, tensors: Collection[str] = ()) -> int:
    """Bytes that a layer keeps per token. tensors: names, which show the layers with keys of an indexer.

    Raises PlanError for types that do not fit the model or the kind of attention.
    """
    hparams = HParams(dict(metadata), "the model")
    return _token_bytes(hparams, use.settings(hparams), layer, tensors)


def _token_bytes(hparams: HParams, settings: Settings, layer: int, tensors: Collection[str]) -> int:
    settings = settings.of_layer(layer, n_layers(hparams))
    if hparams.architecture == _COMPRESSED:
        parts = _entry_parts(hparams, settings, layer, tensors)
        return sum(part.token_bytes for part in parts.values())
    if not keeps_rows(hparams, layer) or _is_shared(hparams, layer):
        return 0
    if hparams.is_latent:
        heads = LatentHeads.of(hparams)
        if hparams.architecture == "openpangu":  # the reference function of its attention keeps them
            parts = {"kv": CachePart(1, heads.rank + heads.rope)}
        else:
            parts = latent_parts(heads.n, heads.nope + heads.rope, heads.v_width, heads.rank, heads.rope, settings)
    else:
        heads = _heads(hparams, layer)
        parts = grouped_parts(heads.n_kv, heads.k_width, heads.v_width, settings)
    if any(f"blk.{layer}.{name}.weight" in tensors for name in ("indexer.attn_k", "indexer.k_proj", "attn_indexer_k")):
        from ..models.compressed_attention import run_length

        every = run_length(hparams, layer) or 1
        parts["index_k"] = CachePart(1, hparams.size("attention.indexer.key_length"), every=every)
    return sum(part.token_bytes for part in parts.values())


def _is_shared(hparams: HParams, layer: int) -> bool:
    """Whether a layer uses the keys and values of an earlier one."""
    if hparams.architecture not in _SHARING:
        return False
    from ..models.gemma4 import own_layers

    return layer >= own_layers(hparams)


def _entry_parts(hparams: HParams, settings: Settings, layer: int, tensors: Collection[str]) -> dict[str, CachePart]:
    """The parts of the cache for entries that each stand for a run of tokens, and of the keys that an indexer has of them."""
    from ..models.compressed_attention import run_length, selects_entries

    every = run_length(hparams, layer)
    if not every:
        return {}
    parts = entry_parts(hparams.size("attention.key_length"), every, settings)
    if selects_entries(layer, tensors):
        parts["index_k"] = CachePart(1, hparams.size("attention.indexer.key_length"), every=every)
    return parts


def cache_state_bytes(metadata: Mapping[str, Any], layer: int = 0, tensors: Collection[str] = ()) -> int:
    """Bytes of a layer's recurrent state; 0: it has none. tensors: as in `cache_token_bytes`."""
    return _state_bytes(HParams(dict(metadata), "the model"), layer, tensors)


def _state_bytes(hparams: HParams, layer: int, tensors: Collection[str]) -> int:
    if hparams.architecture == _COMPRESSED:
        from ..models.compressed_attention import compressed_states

        shapes = compressed_states(hparams, layer, tensors)
    else:
        shapes = layer_states(hparams, layer)
    return sum(StatePart(shape).nbytes for shape in shapes.values())


def _heads(hparams: HParams, layer: int) -> Heads:
    n_head = of_layer(hparams, "attention.head_count", layer)
    size = hparams.int("embedding_length") // max(1, n_head)
    shared = of_layer(hparams, "attention.head_count_kv", layer, n_head)
    suffix = "_swa" if _is_local(hparams, layer) and "attention.key_length_swa" in hparams else ""
    widths = (hparams.int(f"attention.{part}_length{suffix}", size) for part in ("key", "value"))
    return Heads(n_head, shared, *widths)


def _is_local(hparams: HParams, layer: int) -> bool:
    """Whether a layer has a window, and so heads of another width (Gemma 4); without a pattern all have one."""
    flags = hparams.flags("attention.sliding_window_pattern", hparams.size("block_count", maximum=MAX_LAYERS))
    return flags[layer] if flags else "attention.sliding_window" in hparams


@dataclass(frozen=True)
class RunMemory:
    """What running a model takes beside its weights, in bytes, whatever their types are.

    rows      of each layer's keys and values, for all tokens
    states    of each layer's recurrent state
    buffer    to compute in, of each GPU with layers, or of RAM without GPUs
    """

    rows: tuple[int, ...]
    states: tuple[int, ...]
    buffer: int

    @classmethod
    def of(cls, metadata: Mapping[str, Any], use: Use, tensors: Collection[str], on_gpus: bool) -> RunMemory:
        """tensors: as in `cache_token_bytes`."""
        hparams = HParams(dict(metadata), "the model")
        tokens, settings = sequence_length(hparams, use.n_ctx), use.settings(hparams)
        layers = range(hparams.size("block_count", maximum=MAX_LAYERS))
        rows = tuple(tokens * _token_bytes(hparams, settings, layer, tensors) for layer in layers)
        states = tuple(_state_bytes(hparams, layer, tensors) for layer in layers)
        return cls(rows, states, compute_bytes(metadata, use) if on_gpus else processor_bytes(metadata, use))


@dataclass(frozen=True)
class TensorPlaces:
    """Where tensors go by their names, whatever their types are.

    places   tensor name -> (device, what decided it)
    matched  override -> the first tensor that it matches; ''
    layers   as of `Placement`
    """

    places: dict[str, tuple[str, str]]
    matched: dict[str, str]
    layers: dict[int, str]

    @classmethod
    def of(
        cls,
        names: Sequence[str],
        metadata: Mapping[str, Any],
        use: Use,
        overrides: Sequence[TensorOverride],
        capacities: Mapping[str, int | None],
    ) -> TensorPlaces:
        """As `place`."""
        gpus = [name for name in capacities if name != CPU]
        for rule in overrides:
            if rule.device not in capacities:
                raise PlanError(f"{rule.origin} {rule}: there is no {rule.device}; give its memory with --vram")
        n_layer = HParams(dict(metadata), "the model").size("block_count", maximum=MAX_LAYERS)
        layers = _layer_devices(n_layer, use.gpu_layers, _shares(gpus, capacities, use.tensor_split))
        made, pairs = cls({}, dict.fromkeys(map(str, overrides), ""), layers), dict[tuple[str, str], tuple[str, str]]()
        for name in names:
            rules = [rule for rule in overrides if rule.pattern.search(name)]
            for rule in rules:
                made.matched[str(rule)] = made.matched[str(rule)] or name
            usual = _default_device(name, layers, n_layer), "-ngl" if gpus else ""
            pair = (rules[0].device, str(rules[0])) if rules else usual
            made.places[name] = pairs.setdefault(pair, pair)
        return made


def place(
    weights: Collection[TensorSize],
    metadata: Mapping[str, Any],
    use: Use,
    overrides: Sequence[TensorOverride],
    capacities: Mapping[str, int | None],
    running: RunMemory | None = None,
    where: TensorPlaces | None = None,
) -> Placement:
    """capacities: CPU and CUDA0, CUDA1, ... -> bytes or None, in order. running, where: of the model and the use, if they are
    known. Raises PlanError for a rule with another device."""
    devices = {name: Device(name, size) for name, size in capacities.items()}
    gpus = [name for name in devices if name != CPU]
    where = where or TensorPlaces.of([weight.name for weight in weights], metadata, use, overrides, capacities)
    running = running or RunMemory.of(metadata, use, where.places, bool(gpus))
    layers, n_layer = where.layers, len(where.layers) - 1
    placement = Placement(list(devices.values()), where.places, {str(rule): (0, 0) for rule in overrides}, layers)
    packed: list[TensorSize] = []
    for weight in weights:
        device, why = where.places[weight.name]
        if weight.type.rows > 1 and device != CPU:
            packed.append(weight)
        if why in placement.hits:
            count, size = placement.hits[why]
            placement.hits[why] = (count + 1, size + weight.nbytes)
        devices[device].weights += weight.nbytes
        devices[device].tensors += 1
    _copy_tied_output(placement, weights, layers[n_layer])
    for layer, (rows, state) in enumerate(zip(running.rows, running.states, strict=True)):
        devices[layers[layer]].cache += rows + 2 * state  # one is read and another written; checkpoints stay in RAM
        devices[CPU].cache += Settings.checkpoints * state
    for name in gpus or [CPU]:
        devices[name].compute = running.buffer if not gpus or name in layers.values() else 0
    _warn(placement, packed, where.matched, overrides)
    return placement


def _shares(gpus: Sequence[str], capacities: Mapping[str, int | None], split: Sequence[float] | None) -> dict[str, float]:
    """GPU -> its share of the layers, of any sum: as given, or its memory. Raises PlanError for shares that do not fit."""
    if split is None:
        return {name: capacities[name] or 1 for name in gpus}
    if len(split) != len(gpus) or min(split) < 0 or not sum(split):
        raise PlanError(f"--tensor-split {','.join(map(str, split))}: one share for each of {', '.join(gpus) or 'no GPUs'}")
    return dict(zip(gpus, split, strict=True))


def _layer_devices(n_layer: int, wanted: int | None, gpus: Mapping[str, float]) -> dict[int, str]:
    """Layer -> device; n_layer stands for the output. Several GPUs take runs of layers in proportion to their shares."""
    count = min(n_layer + 1, n_layer + 1 if wanted is None else wanted) if gpus else 0
    first = n_layer + 1 - count if count > n_layer else n_layer - count
    names, sizes = list(gpus), list(gpus.values())
    devices = dict.fromkeys(range(n_layer + 1), CPU)
    on_gpu = range(first, n_layer + 1 if count > n_layer else n_layer)
    for i, layer in enumerate(on_gpu):
        share, at = (i + 0.5) / len(on_gpu) * sum(sizes), 0
        while share > sum(sizes[: at + 1]):
            at += 1
        devices[layer] = names[at]
    return devices


def _copy_tied_output(placement: Placement, weights: Collection[TensorSize], device: str) -> None:
    """Embeddings that serve as output matrix lie in RAM, to be looked up, and once more where the output is computed."""
    if device == CPU or "output.weight" in placement.places:
        return
    table = next((weight for weight in weights if weight.name == "token_embd.weight"), None)
    if table is None:
        return
    if placement.hits.get(placement.places[table.name][1]):
        return
    placement.tied_output = device
    next(each for each in placement.devices if each.name == device).weights += table.nbytes


def layer_number(name: str) -> int:
    """The layer that a tensor belongs to; -1: to none."""
    match = re.match(r"blk\.(\d+)\.", name)
    return int(match[1]) if match else -1


def _default_device(name: str, layers: Mapping[int, str], n_layer: int) -> str:
    """The device of a weight that no rule takes: its layer's; embeddings stay in RAM, since they are only looked up."""
    layer = layer_number(name)
    if layer >= 0:
        return layers.get(layer, CPU)
    return CPU if name.startswith(("token_embd", "per_layer_token_embd")) else layers[n_layer]


def _warn(
    placement: Placement, packed: Sequence[TensorSize], matched: Mapping[str, str], overrides: Sequence[TensorOverride]
) -> None:
    """packed: interleaved tensors that lie on other devices than the processor's."""
    for rule in dict.fromkeys(map(str, overrides)):
        if not placement.hits[rule][0]:
            taker = placement.places[matched[rule]][1] if matched[rule] else ""
            why = f"{taker} comes first and takes {matched[rule]}" if taker else "it matches no tensor"
            placement.warnings.append(f"-ot {rule} does nothing: {why}")
    if packed:
        more = f" and {len(packed) - 1} more" if len(packed) > 1 else ""
        where = placement.places[packed[0].name][0]
        placement.warnings.append(
            f"{packed[0].name} ({packed[0].type.name}){more} would lie on {where}: interleaved rows are for CPUs; give it the "
            "plain type, or keep it in RAM"
        )
    for device in placement.devices:
        if device.free is not None and device.free < 0:
            placement.warnings.append(f"{device.name} lacks {-device.free / MIB:,.0f} MiB")
