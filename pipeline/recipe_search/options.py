"""What a search is asked for: the target and how to search, from arguments or from a recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...formats import PlanError, TensorType
from ...jobs.patterns import NamePattern, compile_pattern
from ...quantize.recipes.loader_types import LoaderTypes
from ...quantize.recipes.recipe import TARGETS, Recipe
from ...quantize.recipes.rules import parse_type
from ...quantize.search.quant_error import DEFAULT_TYPES
from ..common.arguments import as_bytes


@dataclass(frozen=True)
class Target:
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
            raise PlanError("--gpu-size needs --gpu REGEX beside it, and --target-size or --target-bpw")

    @property
    def text(self) -> str:
        """'180,000,000 bytes', '4.5 bits per weight', 'a KL divergence of 0.02'."""
        if self.size is not None:
            return f"{self.size:,} bytes"
        return f"{self.bits:g} bits per weight" if self.bits is not None else f"a KL divergence of {self.divergence:g}"


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
    loader = LoaderTypes(program)
    given = types.split(",") if isinstance(types, str) else types or ()
    names = [part.strip() if isinstance(part, str) else part.name for part in given]
    parsed_types: dict[str, TensorType] = {}
    for name in [name for name in names if name] or ["default"]:
        for one in loader.usual(DEFAULT_TYPES) if name.lower() == "default" else [name]:
            parsed = parse_type(one, where)
            if not loader.reads(parsed):
                raise PlanError(
                    f"{where}: {program} does not know {parsed.name}; it knows {', '.join(loader.alternatives(parsed))}"
                )
            parsed_types[parsed.name] = parsed
    return tuple(parsed_types.values())


def target_of(
    recipe: Recipe, size: int | None = None, bits: float | None = None, divergence: float | None = None
) -> Target | None:
    """The target that arguments give, else that of [quantize] in the recipe; None if neither gives one."""
    quantize, search = recipe.stages.get("quantize", {}), recipe.stages.get("search", {})
    if size is None and bits is None and divergence is None:
        if not set(TARGETS) & set(quantize):
            return None
        size, bits, divergence = as_bytes(quantize.get("target_size")), quantize.get("target_bpw"), quantize.get("max_kld")
    gpu = search.get("gpu")
    pattern = compile_pattern(gpu, f"{recipe.name}, [search] gpu") if gpu else None
    return Target(size, bits, divergence, pattern, as_bytes(search.get("gpu_size")))


# Keys of [search] -> fields of SearchOptions.
_FIELDS = {"ctx": "n_ctx", **{name: name for name in ("repacked", "chunks", "rows", "seed", "measurements", "refine")}}


def search_options_of(
    recipe: Recipe,
    folder: Path,
    *,
    types: str | Sequence[TensorType | str] | None = None,
    text: Path | None = None,
    threads: int | None = None,
    program: str | None = None,
) -> SearchOptions:
    """What [search] of a recipe says, whose text is relative to `folder`; the arguments types and text beat it.

    Raises RecipeError for an unknown type, PlanError for a text that does not exist.
    """
    search = recipe.stages.get("search", {})
    given, where = (search.get("types"), f"{recipe.name}, [search] types") if types is None else (types, "--types")
    allowed = parse_types(given, where, program)
    values: dict[str, Any] = {_FIELDS[key]: value for key, value in search.items() if key in _FIELDS}
    if text is None and "text" in search:
        named = Path(folder / search["text"])
        if not named.is_file():
            raise PlanError(f"{recipe.name}, [search] text: {named} {'is no file' if named.exists() else 'does not exist'}")
        text = named
    return SearchOptions(allowed, text=text, threads=threads, program=program, **values)
