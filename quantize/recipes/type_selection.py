"""Selecting the type that each tensor gets, and what decided it, in llama-quantize's order of precedence.

Flags for single tensors, then recipe rules, then flags for roles, then the stock mix or default type (docs/formats/mixes.md).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache

from ...data_classes import dataclass
from ...formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from ...formats.source import form_of
from .loader_types import LoaderTypes
from .mixes import Mix, ModelTraits
from .rules import Rule, RuleMatcher

# Tensors that llama-quantize never quantises, by the end of the name and by a part of it (docs/formats/mixes.md).
ROUTER = "ffn_gate_inp.weight"
_UNQUANTIZED_SUFFIXES = ("position_embd.weight", "token_types.weight")
_UNQUANTIZED_PARTS = (
    "_norm.weight",
    "ssm_conv1d",
    "shortconv.conv.weight",
    "ssm_x.weight",
    "ssm_dt.weight",
    "attn_rel_b.weight",
    "exp_probs_b",
    "altup_",
    "laurel_",
)
# Of DeepSeek-V4: what streams are mixed with, and biases by position; small, in float32 in checkpoints, kept so here. Of
# Qwen 4 Exp: gates of streams, of a few rows, and a convolution. Of openPangu 2: streams, convolutions and sinks.
_UNQUANTIZED_PARTS += ("hc_attn_fn", "hc_ffn_fn", "output_hc_fn", "_compressor_ape.weight", "_inject.weight", "ple_conv1d")
_UNQUANTIZED_PARTS += ("_mhc_phi", "attn_qa_conv", "attn_compresskv_conv", "attn_o_conv", "attn_param_sink_")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"
INTEGER_TYPES = ("i8", "i16", "i32", "i64")

# Roles that a flag can give a type to: (role, part of the tensor name); the first entry that fits counts.
ROLES = (
    ("attn_v", "attn_v.weight"),
    ("attn_qkv", "attn_qkv"),
    ("attn_k", "attn_k"),
    ("attn_q", "attn_q"),
    ("attn_output", "attn_output.weight"),
    ("ffn_down", "ffn_down"),
    ("ffn_gate", "ffn_gate"),
    ("ffn_up", "ffn_up"),
)

# Values of `Selection.rule` for tensors that no rule, flag or default decided.
UNCHANGED, NOT_QUANTIZED = "kept", "stays f32"


@dataclass(frozen=True)
class Selection:
    """The type a tensor gets, the rule, flag or default that decided it, and a note if a fallback type had to be taken."""

    type: TensorType
    rule: str
    note: str = ""


@dataclass(frozen=True)
class TypeOverrides:
    """Types given on the command line for single tensors and for roles.

    All of them take precedence over the mix; those of embeddings, output and router also over the rules.

    roles         role (a name in ROLES) -> type
    leave_output  the output matrix keeps its type
    extra_output  a copy of the output matrix in this type is written too
    """

    token_embedding: TensorType | None = None
    output: TensorType | None = None
    router: TensorType | None = None
    roles: Mapping[str, TensorType] = field(default_factory=dict)
    leave_output: bool = False
    extra_output: TensorType | None = None


def is_quantizable(tensor: SourceTensor) -> bool:
    """Whether rules apply to this tensor: a weight matrix that is no router, norm or integer tensor."""
    return _is_matrix(tensor) and not tensor.name.endswith(ROUTER)


def _is_matrix(tensor: SourceTensor) -> bool:
    return len(tensor.shape) >= 2 and tensor.source_type not in INTEGER_TYPES and _names_matrix(form_of(tensor.name))


@lru_cache(4096)
def _names_matrix(name: str) -> bool:
    is_kept = name.endswith(_UNQUANTIZED_SUFFIXES) or any(part in name for part in _UNQUANTIZED_PARTS)
    return name.endswith("weight") and not is_kept


@lru_cache(4096)
def _role(name: str) -> str:
    """What flags call the tensors of a name; '' if there is no flag for them."""
    return next((role for role, part in ROLES if part in name), "")


class TypeSelector:
    """Selects types for the tensors of one source. `select` has to be called in the source's order, once for each tensor that
    `tells_apart` from others of its group, and once for each other group.

    default     for tensors that no rule matches: a type, a file type's name (its mix applies), or None (they keep their type)
    file_type   the default's name, if it is one
    program     that is to load the file, one of `loaders.PROGRAMS`; None: any
    hits        rule -> number of tensors it decided; role -> number of tensors its flag decided
    overridden  rule -> the first tensor that it matches first but does not decide, and what decides instead
    unselected  name -> number of tensors that nothing decided
    """

    def __init__(
        self,
        source: TensorSource,
        default: TensorType | str | None,
        rules: Sequence[Rule],
        overrides: TypeOverrides,
        has_imatrix: bool,
        pure: bool = False,
        program: str | None = None,
    ):
        self.types = LoaderTypes(program)
        self.matcher, self.overrides, self.pure = RuleMatcher(() if pure else rules), overrides, pure
        self.tied = OUTPUT not in source.tensors
        self.hits: dict[Rule | str, int] = dict.fromkeys([*rules, *overrides.roles], 0)
        self.overridden: dict[Rule, tuple[str, str]] = {}
        self.unselected: dict[str, int] = {}
        self._chosen: dict[tuple[object, ...], Selection] = {}
        self.file_type = default if isinstance(default, str) else None
        self.default, self.mix = default, None
        if isinstance(default, str):
            embedding = source.tensors.get(EMBEDDINGS[0])
            n_vocab = embedding.shape[1] if embedding else 0
            self.mix = Mix(default, ModelTraits.of(source.metadata, source.tensors, n_vocab, has_imatrix))
            self.default = self.mix.default
            if pure or self.default.is_float:
                self.mix = None

    def tells_apart(self, tensor: SourceTensor) -> bool:
        """Whether tensors of a group (`TensorSource.groups`) may get different types; tensor: one of them."""
        form = form_of(tensor.name)
        if self.matcher.tells_apart(form):
            return True
        return self.mix is not None and is_quantizable(tensor) and self.mix.tells_apart(form, tensor.shape[0])

    def select(self, tensor: SourceTensor, n: int = 1) -> Selection:
        """The type of a tensor, which stands for n alike ones. Raises PlanError if neither the type that was asked for nor a
        fallback can hold its rows, and for a type that the program does not know."""
        rule = self.matcher.first(tensor.name)
        selection = self._decide(tensor, rule, n)
        self.types.check(tensor.name, selection.type, selection.rule)
        if rule is not None:
            if selection.rule == str(rule) or selection.type is rule.type:
                self.hits[rule] += n
            else:
                self.overridden.setdefault(rule, (tensor.name, selection.rule))
        return selection

    def _decide(self, tensor: SourceTensor, rule: Rule | None, n: int) -> Selection:
        if not is_quantizable(tensor):
            return self._unquantized(tensor)
        # The mix counts tensors by role: it is asked about each, also where something else decides.
        of_mix = self.mix.select(tensor.name, tensor.shape[0]) if self.mix is not None else None
        if self.overrides.leave_output and tensor.name == OUTPUT:
            return Selection(_lossless_type(tensor), "--leave-output-tensor")
        role = _role(form_of(tensor.name))
        override = self._override(tensor.name)
        if override is not None:
            requested, reason = override
        elif rule is not None:
            requested, reason = rule.type, str(rule)
        elif role in self.overrides.roles:
            self.hits[role] += n
            requested, reason = self.overrides.roles[role], f"--{role.replace('_', '-')}-type"
        elif of_mix is not None:
            assert self.mix is not None
            requested, reason = of_mix.type, self.mix.file_type
            if of_mix.reason:
                requested, reason = self.types.of_mix(of_mix.type), f"{self.mix.file_type}: {of_mix.reason}"
        elif isinstance(self.default, TensorType):
            requested, reason = self.default, "default"
        else:
            self.unselected[tensor.name] = n
            return Selection(_lossless_type(tensor), UNCHANGED)
        return self._with_fallbacks(tensor, requested, reason)

    def _with_fallbacks(self, tensor: SourceTensor, requested: TensorType, reason: str) -> Selection:
        self.types.check(tensor.name, requested, reason)
        key = tensor.shape, tensor.name in EMBEDDINGS, requested.name, reason
        if key not in self._chosen:
            self._chosen[key] = _with_fallbacks(tensor, requested, reason, self.types.fallbacks)
        return self._chosen[key]

    def _unquantized(self, tensor: SourceTensor) -> Selection:
        if tensor.name.endswith(ROUTER) and self.overrides.router is not None and _is_matrix(tensor):
            return self._with_fallbacks(tensor, self.overrides.router, "--ffn-gate-inp-type")
        if tensor.stored is not None and not tensor.stored.is_float:
            return Selection(tensor.stored, UNCHANGED)
        return Selection(TYPES["f32"], NOT_QUANTIZED)

    def _override(self, name: str) -> tuple[TensorType, str] | None:
        """The type and the name of the flag that sets it, for embeddings and output; tied embeddings are both."""
        if name == EMBEDDINGS[0] and self.overrides.token_embedding is not None:
            return self.overrides.token_embedding, "--token-embedding-type"
        is_output = name == OUTPUT or (name == EMBEDDINGS[0] and self.tied)
        return (self.overrides.output, "--output-tensor-type") if is_output and self.overrides.output is not None else None


def plain_for_lookup(tensor: SourceTensor, requested: TensorType) -> TensorType:
    """`requested`, but for embeddings, which are looked up by row, the type without interleaved rows that takes its place."""
    if tensor.name not in EMBEDDINGS or requested.rows == 1:
        return requested
    return TYPES.plain(requested) if requested.base else TYPES.fallback_for(requested, (tensor.shape[0], 1))[0]


def _with_fallbacks(tensor: SourceTensor, requested: TensorType, reason: str, fallbacks: Mapping[str, str]) -> Selection:
    """`requested`, or its fallback where the tensor's rows are not complete blocks or row groups of it.

    fallbacks: type -> fallback that counts instead of the table's.
    """
    plain, note = plain_for_lookup(tensor, requested), ""
    if plain is not requested:
        note = f"{requested.name} asked for; embeddings are looked up by row and stay {plain.name}"
    try:
        chosen, misfit = TYPES.fallback_for(plain, tensor.shape, fallbacks)
    except PlanError as error:
        raise PlanError(f"{tensor.name}: {error}; give it another type (f16 and bf16 hold any)") from None
    if misfit:
        note = f"{plain.name} asked for; {misfit}"
    return Selection(chosen, reason, note)


def _lossless_type(tensor: SourceTensor) -> TensorType:
    """The type that loses nothing: the stored one; bf16 for a source type that GGUF lacks, such as fp8 with its scales."""
    return tensor.stored or (TYPES[tensor.source_type] if tensor.source_type in TYPES else TYPES["bf16"])
