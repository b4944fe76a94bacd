"""The tensors and metadata of a layer of Mamba-2 or Mamba, which several architectures have under other names."""

from __future__ import annotations

from collections.abc import Mapping

from ....data_classes import dataclass
from ...config import FLOAT32_MAX, Config
from ...tensor_transforms import reshaped
from ..decoder_spec import DecoderSpec, LayerTensor, linear

NO_LIMIT = (0.0, float("inf"))


@dataclass(frozen=True)
class Mamba2:
    """Sizes of a layer of Mamba-2: `heads` heads of `width` values, which share factors in `groups` groups; size: of the state,
    per value; kernel: tokens of the convolution."""

    heads: int
    width: int
    groups: int
    size: int
    kernel: int

    @classmethod
    def of(cls, config: Config, keys: Mapping[str, str], inner: int | None = None) -> Mamba2:
        """keys: field -> key of config.json; inner: numbers of all heads together, which they have to make up.

        Raises FormatError for sizes that do not fit together, and for steps that are limited.
        """
        values = {name: config.integer(key) for name, key in keys.items() if name != "width"}
        width = config.get(keys["width"], "auto")
        if width == "auto":
            width = (inner or 0) // values["heads"]
        elif not isinstance(width, int):
            raise config.error(f"{keys['width']} is {width!r:.60}; a whole number or 'auto' is needed")
        sizes = cls(width=width, **values)
        inner = sizes.inner if inner is None else inner
        if sizes.inner != inner or sizes.heads % sizes.groups or not inner:
            raise config.error(f"{sizes.heads} heads of {width} values in {sizes.groups} groups cannot make up {inner} values")
        limit = config.get("time_step_limit", NO_LIMIT)
        if not isinstance(limit, list | tuple) or len(limit) != 2 or limit[0] != 0 or _is_finite(limit[1]):
            raise config.error(f"time_step_limit is {limit!r:.60}: limited steps cannot be converted")
        return sizes

    @property
    def inner(self) -> int:
        return self.heads * self.width

    @property
    def channels(self) -> int:
        """Channels of the convolution: the values, b and c of all groups."""
        return self.inner + 2 * self.groups * self.size

    @property
    def rows(self) -> int:
        """Rows of the input's matrix: the gate, the convolution's channels, the steps."""
        return self.inner + self.channels + self.heads

    def add_metadata(self, spec: DecoderSpec) -> None:
        keys = {"conv_kernel": self.kernel, "inner_size": self.inner, "state_size": self.size}
        keys |= {"time_step_rank": self.heads, "group_count": self.groups}
        spec.add_uint32({f"ssm.{key}": value for key, value in keys.items()})

    def tensors(self, spec: DecoderSpec, source: str, *, conv_bias: bool, norm: bool = True) -> list[LayerTensor]:
        """source: of the layer's tensors in the checkpoint."""
        convolution = [LayerTensor("ssm_conv1d.weight", f"{source}.conv1d.weight", (self.channels, 1, self.kernel))]
        if conv_bias:
            convolution.append(LayerTensor("ssm_conv1d.bias", f"{source}.conv1d.bias", (self.channels,)))
        by_group = reshaped(self.inner // self.groups, self.groups)
        norms = [LayerTensor("ssm_norm.weight", f"{source}.norm.weight", (self.inner,), by_group)] if norm else []
        return [
            *linear("ssm_in", f"{source}.in_proj", (self.rows, spec.hidden_size)),
            *convolution,
            LayerTensor("ssm_dt.bias", f"{source}.dt_bias", (self.heads,)),
            LayerTensor("ssm_a", f"{source}.A_log", (self.heads,), reshaped(1, self.heads, exponential=-1)),
            LayerTensor("ssm_d", f"{source}.D", (self.heads,), reshaped(1, self.heads)),
            *norms,
            *linear("ssm_out", f"{source}.out_proj", (spec.hidden_size, self.inner)),
        ]


def _is_finite(value: object) -> bool:
    """Whether a number limits anything as float32. JSON has several spellings of infinity; 1e308 is one (Nemotron 3 Ultra)."""
    return isinstance(value, int | float) and abs(value) <= FLOAT32_MAX


@dataclass(frozen=True)
class Mamba:
    """Sizes of a layer of Mamba: `inner` values, steps from a matrix of `rank` columns; size, kernel as in `Mamba2`."""

    inner: int
    rank: int
    size: int
    kernel: int

    @classmethod
    def of(cls, config: Config, hidden_size: int, keys: Mapping[str, str]) -> Mamba:
        """keys: of config.json for expand, rank, size and kernel. Raises FormatError for an unusable one."""
        rank = config.get(keys["rank"], "auto")
        rank = -(-hidden_size // 16) if rank == "auto" else config.integer(keys["rank"])
        expand = config.integer(keys["expand"], 2)
        if expand != 2:
            raise config.error(f"{keys['expand']} is {expand}; readers of GGUF know this architecture with 2 only")
        return cls(expand * hidden_size, rank, config.integer(keys["size"], 16), config.integer(keys["kernel"], 4))

    def add_metadata(self, spec: DecoderSpec) -> None:
        keys = {"conv_kernel": self.kernel, "inner_size": self.inner, "state_size": self.size, "time_step_rank": self.rank}
        spec.add_uint32({f"ssm.{key}": value for key, value in keys.items()})

    def tensors(self, spec: DecoderSpec, source: str, *, conv_bias: bool = True, norms: bool = False) -> list[LayerTensor]:
        """norms: the steps and factors are normalised (Jamba)."""
        sizes = {"dt": self.rank, "b": self.size, "c": self.size} if norms else {}
        convolution = [LayerTensor("ssm_conv1d.weight", f"{source}.conv1d.weight", (self.inner, 1, self.kernel))]
        if conv_bias:
            convolution.append(LayerTensor("ssm_conv1d.bias", f"{source}.conv1d.bias", (self.inner,)))
        decay = reshaped(self.size, self.inner, exponential=-1)
        return [
            *linear("ssm_in", f"{source}.in_proj", (2 * self.inner, spec.hidden_size)),
            *convolution,
            *linear("ssm_x", f"{source}.x_proj", (self.rank + 2 * self.size, self.inner)),
            *(spec.norm(f"ssm_{part}_norm", f"{source}.{part}_layernorm", size) for part, size in sizes.items()),
            *linear("ssm_dt", f"{source}.dt_proj", (self.inner, self.rank), bias=True),
            LayerTensor("ssm_a", f"{source}.A_log", (self.inner, self.size), decay),
            LayerTensor("ssm_d", f"{source}.D", (self.inner,)),
            *linear("ssm_out", f"{source}.out_proj", (spec.hidden_size, self.inner)),
        ]
