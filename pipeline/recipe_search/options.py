"""What a search is asked for: the target and how to search, from arguments or from a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, fields
from pathlib import Path
from typing import Any

from ...data_classes import dataclass
from ...formats import PlanError, TensorType
from ...jobs.patterns import NamePattern
from ...jobs.plan import Plan
from ...quantize.recipes.loader_types import LoaderTypes
from ...quantize.recipes.rules import parse_type
from ...recipes import find_text
from ...request_fields import values_of
from ..common.arguments import as_bytes, as_pattern
from ..requests.groups import Measuring, TargetOptions


@dataclass(frozen=True)
class SearchTarget:
    """What to reach, one of: bytes of the file, bits per weight of its tensors, KL divergence in nats.

    gpu: tensors with a budget of their own, of gpu_bytes. Raises PlanError unless one target above 0 is given.
    """

    size: int | None = None
    bits: float | None = None
    divergence: float | None = None
    gpu: NamePattern | None = None
    gpu_bytes: int | None = None

    def __post_init__(self) -> None:
        given = [value for value in (self.size, self.bits, self.divergence) if value is not None]
        if len(given) != 1:
            raise PlanError("a search needs one target: --target-size, --target-bpw or --max-kld")
        if not given[0] > 0:
            raise PlanError(f"a target of {given[0]} cannot be reached: it has to be above 0")
        if self.gpu_bytes is not None and (self.gpu is None or self.divergence is not None):
            raise PlanError("--gpu-size needs --gpu REGEX, and --target-size or --target-bpw")

    @property
    def text(self) -> str:
        """'180,000,000 bytes', '4.5 bits per weight', 'a KL divergence of 0.02'."""
        if self.size is not None:
            return f"{self.size:,} bytes"
        return f"{self.bits:g} bits per weight" if self.bits is not None else f"a KL divergence of {self.divergence:g}"

    def limit(self, n_elements: int) -> int:
        """Bytes that a size, or bits of so many weights, allow; `size_of` is what a plan takes of them."""
        if self.bits is not None:
            return int(self.bits * n_elements / 8)
        assert self.size is not None
        return self.size

    def size_of(self, plan: Plan) -> int:
        return plan.total_bytes if self.bits is not None else plan.file_bytes


@dataclass(frozen=True)
class SearchOptions:
    """How to search for a recipe.

    types         types to choose from
    repacked      interleaved types (_r4, _r8) where there are such
    text          file that sensitivities are measured on; None: every tensor's relative error counts alike
    n_ctx         tokens per window of the text; chunks: windows to read
    rows, seed    of the sample of each tensor that errors are measured on
    measurements  about the most groups of tensors whose sensitivity is measured one by one
    refine        rounds of measuring again around the result
    threads       None: one per processor
    placement     settings of `load_model` that say on which devices models run
    program       that is to load the file; None: any
    """

    types: tuple[TensorType, ...]
    repacked: bool = False
    text: Path | None = None
    n_ctx: int = 512
    chunks: int = 8
    rows: int = 64
    seed: int = 0
    measurements: int = 128
    refine: int = 0
    threads: int | None = None
    placement: Mapping[str, Any] = field(default_factory=dict)
    program: str | None = None


def parse_types(
    types: str | Sequence[TensorType | str] | None, where: str = "--types", program: str | None = None
) -> tuple[TensorType, ...]:
    """'iq2_k,iq3_k,default', or a list of types: `default` is the usual set, and None too. Raises RecipeError.

    program: that is to load the file; the usual set is what it knows, and other types are an error.
    """
    from ...quantize.search.quant_error import DEFAULT_TYPES

    loader = LoaderTypes(program)
    given = types.split(",") if isinstance(types, str) else types or ()
    names = [part.strip() if isinstance(part, str) else part.name for part in given]
    parsed_types: dict[str, TensorType] = {}
    for name in [name for name in names if name] or ["default"]:
        for one in loader.usual(DEFAULT_TYPES) if name.lower() == "default" else [name]:
            parsed = parse_type(one, where)
            if not loader.reads(parsed):
                raise PlanError(f"{where}: {program} does not know {parsed.name}; {loader.alternatives(parsed)}")
            parsed_types[parsed.name] = parsed
    return tuple(parsed_types.values())


def parse_target(asked: TargetOptions, measuring: Measuring, where: str = "--gpu") -> SearchTarget | None:
    """The target that a request asks for; None if there is none. where: what names the pattern in errors."""
    if asked.target_size is asked.target_bpw is asked.max_kld is None:
        return None
    pattern = as_pattern(measuring.gpu, where) if measuring.gpu is not None else None
    return SearchTarget(as_bytes(asked.target_size), asked.target_bpw, asked.max_kld, pattern, as_bytes(measuring.gpu_size))


def search_options(measuring: Measuring, types: tuple[TensorType, ...], **more: Any) -> SearchOptions:
    """How a request has types searched for. more: further fields."""
    names = [field.name for field in fields(SearchOptions) if field.name in values_of(measuring, Measuring)]
    given = {name: value for name in names if (value := getattr(measuring, name)) is not None}
    if "text" in given:
        given["text"] = find_text(given["text"])
    return SearchOptions(types, **given, **more)
