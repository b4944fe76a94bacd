"""What a request to quantise means once its recipe is read, and its plan: the same for all verbs that plan, and for workers."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..convert import open_source
from ..convert.hub.fetch import is_repository
from ..convert.model_card import file_metadata
from ..convert.outtype import recipe_types
from ..errors import PlanError, UsageError
from ..formats import TensorSource, TensorType
from ..formats.loaders import loader_of
from ..jobs.plan import Plan
from ..quantize.covariance.matrix.covariance_matrix import EFFORTS
from ..quantize.importance import Importance
from ..quantize.planning import plan_quantize
from ..quantize.prune import drop_layers, parse_layers
from ..quantize.recipes.rules import Rule, parse_rules
from ..quantize.recipes.type_selection import ROLES, TypeOverrides
from ..recipes import BUNDLED, find_text
from ..request_fields import values_of
from ..version import __version__
from .common.arguments import as_adapters, as_bytes, as_file_type, as_type, refuse_unused
from .common.encoder_device import encoder_device
from .recipe_search.options import SearchOptions, SearchTarget, parse_target, parse_types, search_options
from .requests.groups import CheckpointOutput, Measuring, moments_of, reading_of
from .requests.quantize import QuantizeRequest, TensorTypes
from .requests.recipe import GivenRecipe, given_recipe, merged

if TYPE_CHECKING:
    from ..quantize.covariance.source import Covariances
    from .requests.convert import ConvertRequest

HIGHEST_EFFORT = EFFORTS[-1] + 1  # as the one below, in the order of the model
KEPT_IN_SEARCH = 4  # triangles of a covariance: types take turns (see `prepare`)
Q = TypeVar("Q", QuantizeRequest, "ConvertRequest")


class Quantization:
    """A request to quantise, with everything that its plan is made of, which is opened when it is first asked for.

    given    the recipe, with the rules of arguments
    request  what was asked, with what the recipe says and what follows from it
    source, importance, covariances  may be set, where they are open already or not made yet
    threads     that prepare covariances; is_searched: many types are tried with them
    is_written  False: of what is only looked at; a checkpoint needs no tokenizer for that, and the imatrix gets no notes
    """

    def __init__(
        self,
        asked: QuantizeRequest,
        *,
        given: GivenRecipe | None = None,
        source: TensorSource | None = None,
        is_written: bool = True,
    ):
        if asked.include_weights and asked.exclude_weights:
            raise PlanError("--include-weights and --exclude-weights cannot be given together")
        self.asked, self.given = asked, given or given_recipe(asked.recipe, asked.custom_q)
        self.overrides, self.is_written = type_overrides(asked), is_written
        self.threads, self.is_searched = asked.threads, False
        self.request = in_order(resolved(merged(asked, self.given)), self.given)
        if source is not None:
            self._opened = source

    # -- what is read

    @cached_property
    def _opened(self) -> TensorSource:
        reading = {**reading_of(self.request), "remote": self.request.remote}
        if not self.is_written:
            reading["vocab"] = reading["vocab"] and None
        return open_source(self.request.source, **reading)

    @cached_property
    def _layers(self) -> tuple[TensorSource, dict[str, str] | None]:
        """The source without the layers that are left out, and the former names of its tensors."""
        if self.request.prune_layers is None:
            return self._opened, None
        return drop_layers(self._opened, parse_layers(self.request.prune_layers))

    @cached_property
    def source(self) -> TensorSource:
        return self._layers[0]

    @cached_property
    def importance(self) -> Importance | None:
        from .common.importance import load_importance

        request = self.request
        if request.imatrix is None:
            return None
        former_names = self._layers[1]
        include, exclude = request.include_weights, request.exclude_weights
        loaded = load_importance(
            Path(request.imatrix), self._opened, include=include, exclude=exclude, quiet=not self.is_written
        )
        return loaded.renamed(former_names) if former_names is not None else loaded

    @cached_property
    def covariances(self) -> Covariances | None:
        from .common.covariance import load_covariances

        request, path = self.request, moments_of(self.request)
        if path is None:
            return None
        former_names = self._layers[1]
        loaded = load_covariances(
            Path(path),
            self._opened,
            self.effort,
            curvature=request.curvature is not None,
            memory=request.memory,
            threads=self.threads,
            kept=KEPT_IN_SEARCH if self.is_searched or self.target is not None else None,
        )
        loaded = self.following(loaded)
        return loaded.renamed(former_names) if former_names is not None else loaded

    def following(self, covariances: Covariances) -> Covariances:
        """The covariances for matrices in the order of the model, if the request says so."""
        if self.request.sequential is None:
            return covariances
        from .writing.sequential import text_identity

        text, chunks = Path(self.request.sequential), self.request.sequential_chunks
        return covariances.following(text.name, text_identity(text, chunks), tunes=self.request.tune)

    @property
    def effort(self) -> int:
        """Of the encoder: the highest is that of the one below, in the order of the model."""
        return 1 if self.request.effort is None else min(self.request.effort, EFFORTS[-1])

    @property
    def files(self) -> list[Path]:
        """What is read beside the source's files."""
        given = self.given.path, self.request.imatrix, moments_of(self.request), self.request.sequential
        return [Path(path) for path in given if path is not None]

    # -- what is searched for

    @cached_property
    def _measuring(self) -> Measuring:
        return merged(Measuring(text=self.asked.calibration), self.given)

    @cached_property
    def target(self) -> SearchTarget | None:
        """What types are searched for, unless they are known."""
        return parse_target(self.request, self._measuring, f"{self.given.recipe.name}, [search] gpu")

    def search_options(self, threads: int | None) -> SearchOptions:
        """How types are searched for. Raises RecipeError for a type that there is not."""
        where = "--types" if self.asked.types is not None else f"{self.given.recipe.name}, [search] types"
        types, program = parse_types(self.request.types, where, self.request.program), self.request.program
        return search_options(self._measuring, types, threads=threads, program=program)

    # -- what is made

    @cached_property
    def types(self) -> tuple[TensorType | str | None, list[Rule]]:
        """(default type, rules): an argument `type` beats the recipe's."""
        given = as_file_type(self.asked.type, "TYPE")
        default, rules = (given, self.given.recipe.rules) if given is not None else recipe_types(self.source, self.given.recipe)
        return default, [*self.given.custom, *rules]

    @cached_property
    def metadata(self) -> dict[str, Any]:
        """The keys that are set."""
        return metadata_to_set(self.request)

    @cached_property
    def device(self) -> str | None:
        names = self.request.device  # of a search a tuple, for the model that runs: its trials are encoded here
        return encoder_device(names) if names is None or isinstance(names, str) else None

    @property
    def has_types(self) -> bool:
        """Whether anything but rules says what types tensors get."""
        return self.types[0] is not None or self.overrides != TypeOverrides()

    def plan(self, text: str | None = None, out: str | Path | None = None, **changed: Any) -> Plan:
        """The plan. text: rules that take the place of the request's; changed: arguments of `plan_quantize`."""
        request = self.request
        default, rules = self.types if text is None else (None, parse_rules(text))
        arguments: dict[str, Any] = {
            "type": default,
            "rules": rules,
            "recipe_text": self.given.text if text is None else text,
            "overrides": self.overrides,
            "importance": self.importance,
            "covariances": self.covariances,
            "pure": request.pure,
            "strict": request.strict,
            "allow_requantize": request.allow_requantize or (self.asked.type is None and self.given.recipe.outtype is not None),
            "ignore_imatrix_rules": request.ignore_imatrix_rules,
            "hide_imatrix": request.hide_imatrix,
            "allow_nonfinite": request.allow_nonfinite,
            "device": self.device,
            "override_kv": self.metadata,
            "split_max_size": as_bytes(request.split_max_size),
            "split_max_tensors": request.split_max_tensors,
            "tensor_first_split": request.tensor_first_split,
            "keep_split": request.keep_split,
            "variant": f"without layers {parse_layers(request.prune_layers)}" if request.prune_layers is not None else "",
            "version": __version__,
            "program": request.program,
        }
        return plan_quantize(self.source, out if out is not None else request.out, **(arguments | changed))


def plan_of(request: QuantizeRequest) -> Plan:
    """The plan of a request: what a worker makes again."""
    return Quantization(request).plan()


def resolved(request: Q) -> Q:
    """The request with what follows from its other fields: the layout that its program reads, and that headers do."""
    return replace(request, mla_layout=layout_of(request), lora=as_adapters(request.lora), remote=is_remote(request))


def in_order(request: QuantizeRequest, given: GivenRecipe) -> QuantizeRequest:
    """The request with the path of the text that it follows. The highest effort has one also where none is named: what the
    recipe's importance matrix is made of, no more than is read of it there, or the bundled text. Raises UsageError for an
    effort that does not exist."""
    if request.effort is not None and not 0 <= request.effort <= HIGHEST_EFFORT:
        raise UsageError(f"--effort {request.effort}: it is a whole number from 0 to {HIGHEST_EFFORT}")
    if request.sequential is not None:
        return replace(request, sequential=find_text(request.sequential))
    if request.effort != HIGHEST_EFFORT or moments_of(request) is None:
        return request
    from ..imatrix.texts import parse_text
    from .requests.imatrix import ImatrixRequest

    read, chunks = merged(ImatrixRequest(request.source), given), request.sequential_chunks
    if chunks is None and read.chunks is not None:
        from .writing.sequential import windows_within

        chunks = max(1, windows_within(read.chunks, read.n_ctx or 512))
    text = parse_text(str(read.text[0])).path if isinstance(read.text, tuple) else find_text(BUNDLED, given.folder)
    return replace(request, sequential=text, sequential_chunks=chunks)


def layout_of(request: QuantizeRequest | ConvertRequest) -> str | None:
    """The layout of latent attention: what is asked for, else what the program reads. A GGUF has the one it has."""
    if request.mla_layout is not None or request.program is None or Path(str(request.source)).suffix == ".gguf":
        return request.mla_layout
    return loader_of(request.program).mla_layout


def is_remote(request: QuantizeRequest | ConvertRequest) -> bool:
    """Whether a repository is read as it is needed: a plan alone takes its headers, and every worker what it needs."""
    return request.remote or ((request.dry_run or request.cluster is not None) and is_repository(request.source))


def metadata_to_set(request: CheckpointOutput) -> dict[str, Any]:
    """The keys of a JSON file, and those that beat them. Raises as `file_metadata`."""
    from_file = file_metadata(Path(request.metadata)) if request.metadata is not None else {}
    return {**from_file, **(request.override_kv or {})}


def type_overrides(request: TensorTypes) -> TypeOverrides:
    """The types that options give single tensors and roles. Raises RecipeError for a name that is none."""
    asked = {
        name: as_type(value, f"--{name.replace('_', '-')}")
        for name, value in values_of(request, TensorTypes).items()
        if not isinstance(value, bool)
    }
    roles = {role: kind for role, _ in ROLES if (kind := asked[f"{role}_type"]) is not None}
    single = asked["token_embedding_type"], asked["output_tensor_type"], asked["ffn_gate_inp_type"]
    return TypeOverrides(*single, roles, request.leave_output_tensor, asked["extra_output_tensor"])


def refuse_without_effect(asked: QuantizeRequest, *, has_target: bool, has_covariance: bool, has_sequence: bool) -> None:
    """Raises UsageError for an argument that has nothing to act on."""
    if not has_covariance:
        refuse_unused(asked, "--covariance or --curvature", "effort", "memory", "sequential")
    if not has_sequence:
        refuse_unused(asked, f"--sequential or --effort {HIGHEST_EFFORT}", "sequential_chunks", "tune")
    if not has_target:
        refuse_unused(asked, "a target (--target-size, --target-bpw, --max-kld)", "types", "calibration")
    if asked.imatrix is None:
        refuse_unused(asked, "--imatrix", "include_weights", "exclude_weights", "hide_imatrix")
    if not asked.dry_run:
        refuse_unused(asked, "--dry-run", "no_timing")
    if asked.leave_output_tensor and asked.output_tensor_type is not None:
        raise UsageError("--leave-output-tensor copies the tensor that --output-tensor-type would encode: give one of them")
