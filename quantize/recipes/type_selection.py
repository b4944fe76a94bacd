"""Which type a tensor becomes, and what decided it: the order of precedence of llama-quantize (spec, section E.3)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...formats import TYPES, PlanError, SourceTensor, TensorSource, TensorType
from .mixes import Mix, Model
from .recipe import Matcher, Rule

# Tensors that llama-quantize never touches (FORMATS E.2): by ending, by part of the name.
ROUTER = "ffn_gate_inp.weight"
_NEVER_ENDING = ("position_embd.weight", "token_types.weight")
_NEVER_PART = ("_norm.weight", "ssm_conv1d", "ssm_x.weight", "ssm_dt.weight", "attn_rel_b.weight", "exp_probs_b")
EMBEDDINGS = ("token_embd.weight", "per_layer_token_embd.weight")
OUTPUT = "output.weight"
INTEGERS = ("i8", "i16", "i32", "i64")

# Roles that a flag can give a type to: (flag, part of the name), the first that fits counts.
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


@dataclass(frozen=True)
class Choice:
    """What a tensor is to become: type, the rule that said so, and a note on a fallback."""

    type: TensorType
    rule: str
    note: str = ""


@dataclass(frozen=True)
class Flags:
    """Types given on the command line for single tensors and for roles. They beat the mix; those of embeddings, output and
    router also beat the rules.

    roles         a name of ROLES -> type
    extra_output  writes a copy of the output matrix in this type beside it
    """

    token_embedding: TensorType | None = None
    output: TensorType | None = None
    router: TensorType | None = None
    roles: Mapping[str, TensorType] = field(default_factory=dict)
    leave_output: bool = False
    extra_output: TensorType | None = None


def quantisable(tensor: SourceTensor) -> bool:
    """Whether a rule may change this tensor: a weight matrix that is neither router, norm nor of integers."""
    return _is_matrix(tensor) and not tensor.name.endswith(ROUTER)


def _is_matrix(tensor: SourceTensor) -> bool:
    return (
        tensor.name.endswith("weight")
        and len(tensor.shape) >= 2
        and tensor.source_type not in INTEGERS
        and not tensor.name.endswith(_NEVER_ENDING)
        and not any(part in tensor.name for part in _NEVER_PART)
    )


class Chooser:
    """Chooses for the tensors of one source, which it has to be asked about in order.

    default   a type for what no rule takes; the name of a file type: that mix; None: such tensors keep their type
    hits      how many tensors each rule decided; by role, how many each role's flag
    overruled the first tensor that a rule came first for but did not decide, and what does
    kept      names of the tensors that nothing said anything about
    """

    def __init__(
        self,
        source: TensorSource,
        default: TensorType | str | None,
        rules: Sequence[Rule],
        flags: Flags,
        has_imatrix: bool,
        pure: bool = False,
    ):
        self.matcher, self.flags, self.pure = Matcher(() if pure else rules), flags, pure
        self.tied = OUTPUT not in source.tensors
        self.hits: dict[Rule | str, int] = dict.fromkeys([*rules, *flags.roles], 0)
        self.overruled: dict[Rule, tuple[str, str]] = {}
        self.kept: list[str] = []
        self.default, self.mix = default, None
        if isinstance(default, str):
            embedding = source.tensors.get(EMBEDDINGS[0])
            model = Model.of(source.metadata, source.tensors, embedding.shape[1] if embedding else 0, has_imatrix)
            self.mix = Mix(default, model)
            self.default = self.mix.default
            if pure or self.default.is_float:
                self.mix = None

    def choose(self, tensor: SourceTensor) -> Choice:
        """Raises PlanError when the type that was asked for holds no such row, nor has a fallback that does."""
        rule = self.matcher.first(tensor.name)
        choice = self._decide(tensor, rule)
        if rule is not None:
            if choice.rule == str(rule) or choice.type is rule.type:
                self.hits[rule] += 1
            else:
                self.overruled.setdefault(rule, (tensor.name, choice.rule))
        return choice

    def _decide(self, tensor: SourceTensor, rule: Rule | None) -> Choice:
        if not quantisable(tensor):
            return self._untouched(tensor)
        mixed = self.mix.choose(tensor.name, tensor.shape[0]) if self.mix is not None else None
        if self.flags.leave_output and tensor.name == OUTPUT:
            return Choice(_kept_type(tensor), "--leave-output-tensor")
        role = next((name for name, part in ROLES if part in tensor.name), "")
        special = self._special(tensor.name)
        if special is not None:
            wanted, why = special
        elif rule is not None:
            wanted, why = rule.type, str(rule)
        elif role in self.flags.roles:
            self.hits[role] += 1
            wanted, why = self.flags.roles[role], f"--{role.replace('_', '-')}-type"
        elif mixed is not None:
            assert self.mix is not None
            wanted, why = mixed, self.mix.file_type
        elif isinstance(self.default, TensorType):
            wanted, why = self.default, "default"
        else:
            self.kept.append(tensor.name)
            return Choice(_kept_type(tensor), "kept")
        return _fitted(tensor, wanted, why)

    def _untouched(self, tensor: SourceTensor) -> Choice:
        if tensor.name.endswith(ROUTER) and self.flags.router is not None and _is_matrix(tensor):
            return _fitted(tensor, self.flags.router, "--ffn-gate-inp-type")
        if tensor.stored is not None and not tensor.stored.is_float:
            return Choice(tensor.stored, "kept")
        return Choice(TYPES["f32"], "stays f32")

    def _special(self, name: str) -> tuple[TensorType, str] | None:
        if name == EMBEDDINGS[0] and self.flags.token_embedding is not None:
            return self.flags.token_embedding, "--token-embedding-type"
        output = name == OUTPUT or (name == EMBEDDINGS[0] and self.tied)  # tied: the embeddings are the output too
        return (self.flags.output, "--output-tensor-type") if output and self.flags.output is not None else None


def _fitted(tensor: SourceTensor, wanted: TensorType, why: str) -> Choice:
    """With the fallbacks: embeddings are not interleaved, and a type holds rows of some lengths only."""
    note = ""
    if tensor.name in EMBEDDINGS and wanted.rows > 1:
        plain = TYPES[wanted.base] if wanted.base else TYPES.fallback_for(wanted, (tensor.shape[0], 1))[0]
        note = f"{wanted.name} asked for; embeddings are looked up by row and stay {plain.name}"
        wanted = plain
    try:
        chosen, reason = TYPES.fallback_for(wanted, tensor.shape)
    except PlanError as error:
        raise PlanError(f"{tensor.name}: {error}; give it another type (f16 and bf16 hold any)") from None
    if reason:
        note = f"{wanted.name} asked for; {reason}"
    return Choice(chosen, why, note)


def _kept_type(tensor: SourceTensor) -> TensorType:
    """The type that loses nothing: as stored; fp8 with its scales fits in bf16."""
    return tensor.stored or (TYPES[tensor.source_type] if tensor.source_type in TYPES else TYPES["bf16"])
