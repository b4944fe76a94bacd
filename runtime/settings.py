"""How a model is run: the settings, and what each may be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from ..errors import PlanError
from ..request_fields import fields_of, option, request
from .hparams import HParams

NUMA_MODES = ("distribute", "isolate", "numactl")  # of llama.cpp
CACHE_TYPES = ("f32", "f16", "bf16", "q8_0", "q6_0", "q5_0", "q4_0", "iq4_nl", "q8_KV")
PLAIN_TYPES = ("f32", "f16", "bf16")
_MOST_THREADS = 1024
_MOST_CPUS = 1 << 16
_COUNTS = ("batch", "ubatch", "parallel", "attention_bytes", "checkpoints")
_OPTIONAL_COUNTS = ("n_ctx", "threads", "cache_bytes", "gpu_layers", "n_cpu_moe", "main_gpu", "device_memory")
_FROM_ZERO = ("cache_bytes", "gpu_layers", "n_cpu_moe", "main_gpu")
_FLAGS = ("flash", "repack", "exact", "round_activations", "cpu_moe")
_TYPES = ("cache_k", "cache_v")
_TYPES_OF_LAYERS = ("cache_k_first", "cache_k_last", "cache_v_first", "cache_v_last")


def _first_or_last(part: str, which: str) -> Any:
    name = f"--cache-type-{part[0]}-{which}"
    return option(
        f"Cache the {part} of the {which} N layers in this type.",
        doc=f"(type, n): the type of the {part} of the {which} n layers.",
        default=None,
        flags=f"-ct{part[0]}-{which} {name}",
        kind="cache_type_of_layers",
        metavar="TYPE,N",
        shown=f"as --cache-type-{part[0]}",
        rare=True,
    )


def _hadamard(part: str, others: str) -> Any:
    letter = part[0]
    return option(
        f"Rotate {part} by a Hadamard transform before they are cached{others}: their largest numbers are then spread out, and "
        "a quantised cache loses less.",
        default=None,
        flags=f"-{letter}had/-no-{letter}had --{letter}-cache-hadamard/--no-{letter}-cache-hadamard",
        shown="on where they are quantised",
        rare=True,
    )


@request
class CacheTypes:
    """How keys and values are cached."""

    section: ClassVar[str] = "Cache of keys and values"

    cache_k: str | None = option(
        "Cache keys in this type; with -mla 2 and 3 the latents.",
        default=None,
        flags="-ctk --cache-type-k",
        choices=CACHE_TYPES,
        shown="f16",
    )
    cache_v: str | None = option(
        "Cache values in this type.", default=None, flags="-ctv --cache-type-v", choices=CACHE_TYPES, shown="f16"
    )
    cache_k_first: tuple[str, int] | None = _first_or_last("keys", "first")
    cache_k_last: tuple[str, int] | None = _first_or_last("keys", "last")
    cache_v_first: tuple[str, int] | None = _first_or_last("values", "first")
    cache_v_last: tuple[str, int] | None = _first_or_last("values", "last")
    k_cache_hadamard: bool | None = _hadamard("keys", ", and queries likewise")
    v_cache_hadamard: bool | None = _hadamard("values", ", and results of attention back")


CACHE_SETTINGS = tuple(field.name for field in fields_of(CacheTypes))


@request
class LayerPlacement:
    """Which layers and tensors lie on devices."""

    section: ClassVar[str] = "Devices"

    gpu_layers: int | None = option(
        "Put this many layers on devices, the last ones, and after them the output.",
        default=None,
        flags="-ngl --n-gpu-layers --gpu-layers",
        least=0,
        shown="all",
    )
    override_tensor: Sequence[str] = option(
        "Put the tensors that match on this device: CPU, CUDA0, ...; the first match wins.",
        default=(),
        flags="-ot --override-tensor",
        kind="texts",
        metavar="REGEX=DEVICE,...",
    )
    cpu_moe: bool = option("Keep all experts in RAM.", default=False, rare=True)
    n_cpu_moe: int | None = option("Keep the experts of the first N layers in RAM.", default=None, least=0)
    tensor_split: Sequence[float] | None = option(
        "Share the layers out among the devices in these proportions.",
        default=None,
        flags="-ts --tensor-split",
        kind="shares",
        metavar="N,N,...",
        shown="by memory",
        rare=True,
    )


@request
class PlacementOptions(LayerPlacement):
    """What runs where."""

    section: ClassVar[str] = "Devices"

    device: tuple[str, ...] | None = option(
        "Use these devices of torch: cuda (all), cuda:1, xpu, mps, cpu, auto; or none.",
        default=None,
        flags="-dev --device",
        kind="device_names",
        metavar="NAME,...",
        shown="none; auto with -ngl, -ot, ...",
    )
    main_gpu: int | None = option(
        "Use this one of the devices alone.", default=None, flags="-mg --main-gpu", least=0, shown="all of them", rare=True
    )
    device_memory: int | None = option(
        "Use at most this much memory of each device for weights; others are copied there layer by layer, as they are used.",
        default=None,
        kind="size",
        shown="no limit",
        rare=True,
    )


PLACEMENT = tuple(field.name for field in fields_of(PlacementOptions))


@request
class Settings(CacheTypes, PlacementOptions):
    """How a model is run; every field can be given to `load_model` by name."""

    reference: ClassVar[str] = "Settings of `load_model`, see `Settings`; none for a model that is loaded"
    section: ClassVar[str] = "Model and threads"

    n_ctx: int | None = option(
        "Make room for this many tokens of context.",
        default=None,
        flags="-c --ctx-size",
        least=4,
        most=2**31 - 1,
        shown="the model's",
    )
    cache_bytes: int | None = option(
        "Keep decoded float32 weights in memory, up to this many bytes.",
        default=None,
        shown="4 GiB, or a quarter of what is free if that is less",
        in_cli=False,
    )
    threads: int | None = option("Use this many threads.", default=None, flags="-t --threads", least=1, shown="all processors")
    cpus: tuple[int, ...] | None = option(
        "Run on these processors: the bits of a hexadecimal number.",
        doc="Numbers of the processors that the threads may use.",
        default=None,
        flags="-C --cpu-mask",
        kind="cpus",
        shown="all that the process may use",
        rare=True,
    )
    numa: str | None = option(
        "Place threads and memory. distribute: over all NUMA nodes; isolate: on this node; numactl: as numactl has set it.",
        default=None,
        choices=NUMA_MODES,
        shown="by the system",
        rare=True,
    )
    batch: int = option(
        "Set the logical batch size: tokens of several sequences in one call.",
        default=2048,
        flags="-b --batch-size",
        least=1,
        rare=True,
    )
    ubatch: int = option(
        "Run this many tokens per pass through the layers: larger passes are faster, smaller ones take less "
        "memory. Windows of a text are run whole, or in pieces of 2048 tokens if they are longer.",
        default=2048,
        flags="-ub --ubatch-size",
        least=1,
    )
    flash: bool = option(
        "Use flash attention, which never stores all scores.", default=True, flags="-fa --flash-attn", kind="switch", shown="on"
    )
    mla: int = option(
        "Compute latent attention in this way: 0 caches keys and values; 1 latents for keys and for values, and absorbs the "
        "matrices of both into query and output; 2 caches latents once and expands keys and values from them; 3 caches them "
        "once, expands for prompts and absorbs for generated tokens. The numbers are the same up to rounding.",
        default=3,
        flags="-mla --mla-use",
        least=0,
        most=3,
        rare=True,
    )
    attention_bytes: int = option(
        "Use at most this much memory for the buffers of attention: for scores, or for keys and values that "
        "it expands from latents.",
        doc="Most bytes for the buffers of attention: scores, or keys and values that it expands from latents.",
        default=512 << 20,
        flags="-amb --attn-max-batch",
        kind="mebibytes",
        shown="512 MiB",
        rare=True,
    )
    repack: bool = option(
        "Interleave rows of the weights when loading, in memory.", default=False, flags="-rtr --run-time-repack", rare=True
    )
    expert_reduction: tuple[int, float] | None = option(
        "Use N experts per token, and further ones only if their weight is at least T times the strongest's.",
        doc="(n, share): a token uses its n strongest experts, and of the others it would use those that weigh at least share "
        "times the strongest.",
        default=None,
        flags="-ser --smart-expert-reduction",
        kind="expert_reduction",
        rare=True,
    )
    exact: bool = option(
        "Multiply weights as float32, without rounding the activations to eight bits first.", default=False, in_cli=False
    )
    checkpoints: int = option(
        "Keep this many recurrent states of a sequence to go back to, of models with such layers.",
        default=8,
        flags="--ctx-checkpoints",
        least=1,
        rare=True,
    )
    fast: bool | None = option(
        "Round more in products of prompts, as llama.cpp does: activations to bf16 with bf16 and f16 weights, which are "
        "rounded, too (else there are sums of two bf16 numbers, or float32), up to twice as fast with AVX512-BF16; and, "
        "where that is faster, weights of types of up to 6.625 bits to eight bits with a scale per 256 of a row, of up to "
        "five bits with activations alike (else each group keeps its scale, and activations have one per 32). Attention over "
        "caches of f16 or bf16 rounds queries, the keys' weights and cached rows to bf16 where heads are multiples of 32 "
        "numbers and there is AVX512-BF16 without AMX; queries for keys of q8_0 are rounded to bytes with VNNI: of generated "
        "tokens, too, where at least sixteen heads share keys (as all do with latents, unless an indexer selects some).",
        default=None,
        in_cli=False,
        shown="for generating text and measuring speed",
    )
    round_activations: bool = option(
        "Round activations to bf16, for the noise floor of comparisons.", default=False, in_cli=False
    )
    lora: tuple[str, ...] = option(
        "Run with a LoRA adapter: a GGUF, or (of a checkpoint) a folder that peft wrote; may be given several times.",
        default=(),
        kind="texts",
        metavar="FILE[=SCALE]",
    )
    parallel: int = option(
        "Serve up to this many sequences at once, each with the whole context.",
        default=1,
        flags="-np --parallel",  # of all verbs, or -np would be read as -n p
        kind="one_sequence",
        hidden=True,
    )

    @property
    def cache_types(self) -> tuple[str, str]:
        """The types of keys and of values."""
        usual = "f32" if self.exact else "f16"
        return self.cache_k or usual, self.cache_v or usual

    @property
    def cache_rotations(self) -> tuple[bool, bool]:
        """Whether keys and values are rotated before they are cached: as chosen, else where their type is quantised."""
        chosen = zip(self.cache_types, (self.k_cache_hadamard, self.v_cache_hadamard), strict=True)
        keys, values = (name.lower() not in PLAIN_TYPES if rotates is None else rotates for name, rotates in chosen)
        return keys, values

    @property
    def cache_choices(self) -> tuple[object, ...]:
        """All that decides in which form keys and values are cached."""
        return *self.cache_types, *self.cache_rotations, *(getattr(self, name) for name in _TYPES_OF_LAYERS)

    @property
    def rounds(self) -> bool:
        """Whether attention may round what it multiplies."""
        return bool(self.fast) and not self.exact

    def of_layer(self, layer: int, n_layers: int) -> Settings:
        """With the cache's types of one layer. The types of the last layers go before those of the first ones."""
        types: dict[str, Any] = {}
        for part in ("cache_k", "cache_v"):
            first, last = (getattr(self, f"{part}_{which}") for which in ("first", "last"))
            if first is not None and layer < first[1]:
                types[part] = first[0]
            if last is not None and layer >= n_layers - last[1]:
                types[part] = last[0]
        return replace(self, **types) if types else self


def settings_from(values: dict[str, Any]) -> Settings:
    """Settings by name. Raises PlanError for one that is not known, or a value of the wrong kind or out of range."""
    known = sorted(field.name for field in fields_of(Settings))
    for name in values:
        if name not in known:
            from difflib import get_close_matches

            near = " or ".join(get_close_matches(name, known, 2))
            hint = f"did you mean {near}?" if near else f"there are {', '.join(known)}"
            raise PlanError(f"unknown setting {name!r}; {hint}")
    chosen = Settings(**values)
    for name in (*_COUNTS, *_OPTIONAL_COUNTS):
        value = getattr(chosen, name)
        if value is None and name in _OPTIONAL_COUNTS:
            continue
        if isinstance(value, bool) or not isinstance(value, int):
            raise PlanError(f"setting {name} has to be a whole number, not {value!r:.60}")
        if value < (name not in _FROM_ZERO):
            raise PlanError(f"setting {name} has to be {'0 or more' if name in _FROM_ZERO else 'positive'}, not {value}")
    if chosen.threads is not None and chosen.threads > _MOST_THREADS:
        raise PlanError(f"setting threads is at most {_MOST_THREADS}, not {chosen.threads}")
    if chosen.cpus is not None and not (chosen.cpus and all(type(cpu) is int and 0 <= cpu < _MOST_CPUS for cpu in chosen.cpus)):
        raise PlanError(f"setting cpus has to be numbers of processors, not {chosen.cpus!r:.60}")
    if chosen.numa not in (None, *NUMA_MODES):
        raise PlanError(f"setting numa is one of {', '.join(NUMA_MODES)}, not {chosen.numa!r:.60}")
    for name in _FLAGS:
        if not isinstance(getattr(chosen, name), bool):
            raise PlanError(f"setting {name} has to be True or False, not {getattr(chosen, name)!r:.60}")
    if not isinstance(chosen.fast, bool | None):
        raise PlanError(f"setting fast has to be True, False or None, not {chosen.fast!r:.60}")
    for name in _TYPES:
        if not isinstance(getattr(chosen, name), str | None):
            raise PlanError(f"setting {name} has to be the name of a type, not {getattr(chosen, name)!r:.60}")
    for name in CACHE_SETTINGS[-2:]:
        if not isinstance(getattr(chosen, name), bool | None):
            raise PlanError(f"setting {name} has to be True, False or None, not {getattr(chosen, name)!r:.60}")
    chosen = replace(chosen, **{name: _type_of_layers(name, getattr(chosen, name)) for name in _TYPES_OF_LAYERS})
    if isinstance(chosen.mla, bool) or chosen.mla not in range(4):
        raise PlanError(f"setting mla is one of 0, 1, 2, 3, not {chosen.mla!r:.60}")
    of_values = {"-ctv": chosen.cache_v}
    of_values |= {f"-ctv-{which}": kind[0] for which in ("first", "last") if (kind := getattr(chosen, f"cache_v_{which}"))}
    for flag, kind in of_values.items():
        if not chosen.flash and (kind or "f16").lower() not in PLAIN_TYPES:
            plain = " and ".join((", ".join(PLAIN_TYPES[:-1]), PLAIN_TYPES[-1]))
            raise PlanError(f"quantised values ({flag} {kind}) need flash attention (-fa on); without it {plain} work")
    if chosen.expert_reduction is not None:
        _check_reduction(chosen.expert_reduction)
    if not isinstance(chosen.lora, tuple | list) or not all(isinstance(file, str | Path) for file in chosen.lora):
        raise PlanError(f"setting lora has to be a list of files, FILE or FILE=SCALE, not {chosen.lora!r:.60}")
    return replace(_with_devices(chosen), lora=tuple(map(str, chosen.lora)))


def _type_of_layers(name: str, value: Any) -> tuple[str, int] | None:
    """(type, number of layers). Raises PlanError for anything else."""
    if value is None:
        return None
    if not isinstance(value, tuple | list) or [type(each) for each in value] != [str, int] or value[1] < 1:
        raise PlanError(f"setting {name} has to be a type and a number of layers, such as ('q8_0', 2), not {value!r:.60}")
    return value[0], value[1]


def _with_devices(chosen: Settings) -> Settings:
    """With names and rules as tuples, whether one or several were given. Raises PlanError for what are none."""
    changes: dict[str, Any] = {}
    for name in ("device", "override_tensor"):
        value = getattr(chosen, name)
        values = (
            tuple(value.split(","))
            if isinstance(value, str) and name == "device"
            else (value,)
            if isinstance(value, str)
            else value
        )
        if value is not None and not (isinstance(values, tuple | list) and all(isinstance(each, str) for each in values)):
            raise PlanError(f"setting {name} has to be a text or several, not {value!r:.60}")
        changes[name] = None if values is None else tuple(values)
    split = chosen.tensor_split
    if split is not None:
        if not isinstance(split, tuple | list) or not all(type(share) in (int, float) for share in split):
            raise PlanError(f"setting tensor_split has to be numbers, not {split!r:.60}")
        changes["tensor_split"] = tuple(map(float, split))
    return replace(chosen, **changes)


def check_latent(values: Mapping[str, Any], hparams: HParams) -> None:
    """Raises PlanError where `mla` was chosen for a model without latent attention, or what latents are cached as for one whose
    attention is computed by its reference function."""
    for name, flag in (("cache_k", "-ctk"), ("cache_v", "-ctv")):
        if hparams.architecture == "openpangu" and str(values.get(name)).lower() not in ("none", "f32"):
            raise PlanError(f"{flag} {values[name]} has no effect: latents of this architecture are cached as f32 alone")
    if "mla" in values and not hparams.is_latent:
        raise PlanError(f"-mla {values['mla']} has no effect: {hparams.path} has no latent attention")


def _check_reduction(value: Any) -> None:
    if not isinstance(value, tuple | list) or [type(v) for v in value] not in ([int, float], [int, int]):
        raise PlanError(f"setting expert_reduction has to be experts and a share, such as (4, 0.5), not {value!r:.60}")
    least, share = value
    if least < 1 or not 0 < share <= 1:
        raise PlanError(f"-ser {least},{share}: at least 1 expert, and a share above 0 and not above 1")
