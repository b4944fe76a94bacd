"""How a model is run: the settings, and what each may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from ..formats import PlanError
from .hparams import HParams
from .thread_placement import NUMA_MODES

_MOST_THREADS = 1024
_COUNTS = ("batch", "ubatch", "parallel", "attention_bytes", "checkpoints")
_OPTIONAL_COUNTS = ("n_ctx", "threads", "cache_bytes", "gpu_layers", "n_cpu_moe", "main_gpu", "device_memory")
_FROM_ZERO = ("cache_bytes", "gpu_layers", "n_cpu_moe", "main_gpu")
_FLAGS = ("flash", "repack", "exact", "round_bf16", "cpu_moe")
_TYPES = ("cache_k", "cache_v")
# What runs where.
PLACEMENT = ("device", "gpu_layers", "override_tensor", "cpu_moe", "n_cpu_moe", "tensor_split", "main_gpu", "device_memory")
_MOST_CPUS = 1 << 16
PLAIN_TYPES = ("f32", "f16", "bf16")


@dataclass(frozen=True)
class Settings:
    """How a model is run; every field can be given to `load_model` by name.

    n_ctx             tokens a session may hold; None: the context length that the model was trained for
    cache_bytes       decoded float32 weights kept in memory; None: 4 GiB, or a quarter of what is free if that is less
    threads           threads; None: one per processor that they may use
    cpus              numbers of the processors that the threads may use; None: all that the process may use
    numa              placement by NUMA node, 'distribute', 'isolate' or 'numactl' (see `thread_placement`); None: by the system
    batch             logical batch size: tokens of several sequences in one call
    ubatch            tokens per pass through the layers: more use big matrices better, fewer take less memory for activations.
                      Texts in windows are run in whole ones, in pieces of 2048 tokens where they are longer
    parallel          sequences that a server works on at once, each with n_ctx tokens of its own
    cache_k, cache_v  types of the cached keys and values; None: f16, or f32 with `exact`. With mla 2 and 3 only cache_k counts.
    flash             attention that never stores its scores; without it they are, within `attention_bytes`
    attention_bytes   most that attention takes for scores, or for keys and values that it expands from latents
    mla               latent attention: 0 caches each head's keys and values; 1 caches the latents for keys and for values apart
                      and absorbs the matrices of both into query and output; 2 caches the latents once and expands keys and
                      values from them; 3 caches them once and does whichever multiplies less for the tokens at hand. The same
                      numbers up to rounding.
    repack            weights are interleaved (as `repack` does for files) when they are loaded
    expert_reduction  (n, share): a token uses its n strongest experts, and of the others it would use those that weigh at least
                      share times the strongest
    exact             weights multiply as float32, without rounding the activations to eight bits first
    checkpoints       recurrent states of a sequence that are kept to go back to, of models with such layers (at prompts' ends)
    round_bf16        prompts' products with bf16 weights take activations rounded to bf16, as in llama.cpp, and not sums of two
                      bf16 numbers: up to twice as fast with AVX512-BF16, and as rough as eight-bit activations
    device            devices of torch: 'cuda' (all of them), 'cuda:1', 'xpu', 'mps', 'cpu', 'auto'; None: the cpu backend, or
                      what torch finds where one of the next ones is given
    gpu_layers        layers on devices, the last ones, and after them the output; None: all
    override_tensor   'REGEX=DEVICE,...' with CPU, CUDA0, ...; the first match wins
    cpu_moe           experts stay in the machine's memory; n_cpu_moe: those of the first n layers
    tensor_split      shares of the devices in the layers; None: by their memory
    device_memory     bytes that weights take of each device at most: others are copied there for each use; None: all that are
                      placed there stay there
    main_gpu          number of the only one of these devices that is used; None: all
    lora              LoRA adapters, FILE or FILE=SCALE: a GGUF, or for a checkpoint a folder of peft
    """

    n_ctx: int | None = None
    cache_bytes: int | None = None
    threads: int | None = None
    cpus: tuple[int, ...] | None = None
    numa: str | None = None
    batch: int = 2048
    ubatch: int = 2048
    parallel: int = 1
    cache_k: str | None = None
    cache_v: str | None = None
    flash: bool = True
    attention_bytes: int = 512 << 20
    mla: int = 3
    repack: bool = False
    expert_reduction: tuple[int, float] | None = None
    exact: bool = False
    checkpoints: int = 8
    round_bf16: bool = False
    device: tuple[str, ...] | None = None
    gpu_layers: int | None = None
    override_tensor: tuple[str, ...] = ()
    cpu_moe: bool = False
    n_cpu_moe: int | None = None
    tensor_split: tuple[float, ...] | None = None
    main_gpu: int | None = None
    device_memory: int | None = None
    lora: tuple[str, ...] = ()

    @property
    def cache_types(self) -> tuple[str, str]:
        """Of keys and of values."""
        usual = "f32" if self.exact else "f16"
        return self.cache_k or usual, self.cache_v or usual


def settings_from(values: dict[str, Any]) -> Settings:
    """Settings by name. Raises PlanError for one that is not known, or a value of the wrong kind or out of range."""
    known = sorted(field.name for field in fields(Settings))
    for name in values:
        if name not in known:
            raise PlanError(f"unknown setting {name!r}; there are {', '.join(known)}")
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
    for name in _TYPES:
        if not isinstance(getattr(chosen, name), str | None):
            raise PlanError(f"setting {name} has to be the name of a type, not {getattr(chosen, name)!r:.60}")
    if isinstance(chosen.mla, bool) or chosen.mla not in range(4):
        raise PlanError(f"setting mla is one of 0, 1, 2, 3, not {chosen.mla!r:.60}")
    if not chosen.flash and (chosen.cache_v or "f16").lower() not in PLAIN_TYPES:
        plain = " and ".join((", ".join(PLAIN_TYPES[:-1]), PLAIN_TYPES[-1]))
        raise PlanError(f"quantised values (-ctv {chosen.cache_v}) need flash attention (-fa on); without it {plain} work")
    if chosen.expert_reduction is not None:
        _check_reduction(chosen.expert_reduction)
    if not isinstance(chosen.lora, tuple | list) or not all(isinstance(file, str | Path) for file in chosen.lora):
        raise PlanError(f"setting lora has to be a list of files, FILE or FILE=SCALE, not {chosen.lora!r:.60}")
    return replace(_with_devices(chosen), lora=tuple(map(str, chosen.lora)))


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
    """Raises PlanError where `mla` was chosen for a model without latent attention."""
    if "mla" in values and not hparams.is_latent:
        raise PlanError(f"-mla {values['mla']} has nothing to act on: {hparams.path} has no latent attention; leave it away")


def _check_reduction(value: Any) -> None:
    if not isinstance(value, tuple | list) or [type(v) for v in value] not in ([int, float], [int, int]):
        raise PlanError(f"setting expert_reduction has to be experts and a share, such as (4, 0.5), not {value!r:.60}")
    least, share = value
    if least < 1 or not 0 < share <= 1:
        raise PlanError(f"-ser {least},{share}: at least 1 expert, and a share above 0 and not above 1")
