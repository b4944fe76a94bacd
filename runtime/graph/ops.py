"""The ops that model graphs are made of.

An op is a frozen dataclass: its inputs are `Value`s, its parameters `Weight`s (names of GGUF tensors with their shapes) and
plain options. Shapes are those of one token; a backend adds the axis of tokens in front. Numbers are float32, but for routings.
A backend that does not know an op, or an option's value, refuses the graph when it compiles it.
"""

from __future__ import annotations

from functools import cached_property

from ...data_classes import dataclass
from .activation_ops import Clamp, GaussianTopK, Multiply, SoftplusGate, Xielu
from .mixture_ops import CombineExperts as CombineExperts
from .mixture_ops import ExpertLinear as ExpertLinear
from .mixture_ops import IdentityExperts as IdentityExperts
from .mixture_ops import Route as Route
from .mixture_ops import ScaleByRouting as ScaleByRouting
from .mixture_ops import SigmoidGate as SigmoidGate
from .op import Op as Op
from .values import NgramHash, RotaryEmbedding, Temperature, Value, Weight


@dataclass(frozen=True)
class Embedding(Op):
    """Rows of a table, times scale. by: 'token' (the row of its id), 'position' (that of its position in the sequence), or
    'segment' (as BERT's token types: row 1 behind the first token `separator` of a sequence, else row 0; -1: there is none)."""

    LOOKED_UP = True

    table: Weight
    scale: float = 1.0
    by: str = "token"
    separator: int = -1


@dataclass(frozen=True)
class NgramEmbedding(Op):
    """The rows of a table that stand for the n-grams that end at a token, one after the other (Qwen 4 Exp).

    table (width, rows) -> (heads * width,); the state 'tokens' of `layer` has the last tokens' ids plus 1
    """

    LOOKED_UP = True

    table: Weight
    layer: int
    ngrams: NgramHash


@dataclass(frozen=True)
class HiddenInput(Op):
    """Rows that are given to the pass beside the token ids: the hidden states of another graph."""


@dataclass(frozen=True)
class Concat(Op):
    """The numbers of a, and behind them those of b."""

    a: Value
    b: Value


@dataclass(frozen=True)
class Linear(Op):
    """weight @ x + bias. x of shape (heads, width) counts as (heads * width,)."""

    x: Value
    weight: Weight
    bias: Weight | None = None


@dataclass(frozen=True)
class GroupedLinear(Op):
    """Each group's product with its own matrix: x (groups, columns) -> (groups * rows,).

    weight (columns, groups * rows): the groups' matrices, one after the other
    """

    x: Value
    weight: Weight


@dataclass(frozen=True)
class Split(Op):
    """Cuts the last axis into runs of these sizes: out and `more` are the parts, in order."""

    x: Value
    sizes: tuple[int, ...] = ()
    more: tuple[Value, ...] = ()

    @cached_property
    def outputs(self) -> tuple[Value, ...]:
        return (self.out, *self.more)


@dataclass(frozen=True)
class Reshape(Op):
    """The same numbers in another shape."""

    x: Value


@dataclass(frozen=True)
class Norm(Op):
    """RMS norm, x / sqrt(mean(x^2) + epsilon) * weight, or layer norm: (x - mean) / sqrt(variance + epsilon) * weight + bias.

    weight  None: ones
    kind  'rms' or 'layer'
    over  'last': each row of the last axis by itself (weight: of the last axis, or of all axes, so that each head has its own);
          'all': all elements of a token together
    """

    x: Value
    weight: Weight | None
    epsilon: float
    bias: Weight | None = None
    kind: str = "rms"
    over: str = "last"


@dataclass(frozen=True)
class Rope(Op):
    """Rotates elements start ... start + rope.dims - 1 of the last axis, of x (heads, width) or (width,), by the position."""

    x: Value
    rope: RotaryEmbedding
    start: int = 0


@dataclass(frozen=True)
class Attention(Op):
    """Grouped-query attention: appends k and v to the KV cache of `layer`; each query sees its sequence up to its own position,
    or all of it where the attention is not causal.

    q (heads, k_width), k (kv heads, k_width), v (kv heads, v_width) -> (heads, v_width); k and v are None where those are used
    that an earlier op has appended to the cache of `layer` (Gemma 4)

    scale    factor of the scores
    window   positions that a query sees, its own included; 0: all. Without `causal`: those up to window // 2 away on each side
    chunked  positions are in chunks of `window`, and a query sees those of its own chunk (Llama 4)
    softcap  scores become softcap * tanh(score / softcap); 0: not
    sinks    a logit per head that takes part in the softmax and has no value (gpt-oss)
    selection, block  the keys that each query sees, of `SelectBlocks`, and how many keys a block has; None: all
    alibi    the largest bias of linear biases, ALiBi (arXiv:2108.12409): scores lose slope * distance, with the slopes of
             `values.alibi_slopes`; 0: no biases
    causal   whether queries see no later positions; without it, a sequence has to be computed in one pass
    """

    q: Value
    k: Value | None
    v: Value | None
    layer: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    sinks: Weight | None = None
    chunked: bool = False
    selection: Value | None = None
    block: int = 0
    alibi: float = 0.0
    causal: bool = True


@dataclass(frozen=True)
class LatentAttention(Op):
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values of all heads from one latent.

    q (heads, nope + rope), its last elements rotated; latent (rank,), normalised; k_pe (rope,), rotated, shared by all heads
    -> (heads, v_width). Head h's key is (K_h latent, k_pe) and its value V_h latent.

    kv_b      (rank, heads * (nope + v_width)): K_h above V_h; or None
    k_b, v_b  K_h transposed and V_h, as one 2D tensor each (ik_llama.cpp) or 3D with a matrix per head (llama.cpp); or None.
              kv_b, or both of these, are there
    prefix    of these tensors' names ("blk.0.attn_")
    selection  the keys that each query sees, of `SelectKeys`; None: all
    """

    q: Value
    latent: Value
    k_pe: Value
    layer: int
    scale: float
    v_width: int
    prefix: str
    kv_b: Weight | None = None
    k_b: Weight | None = None
    v_b: Weight | None = None
    selection: Value | None = None

    @property
    def nope(self) -> int:
        """Elements of a head's queries and keys that are not rotated."""
        return self.q.shape[1] - self.k_pe.shape[0]

    @property
    def observed(self) -> tuple[Weight, Weight, Weight]:
        """kv_b, k_b and v_b as observers are given them, those too that the file does not have (k_b and v_b then with a
        matrix per head): an importance matrix may be for a file of the other layout."""
        heads, rank, prefix = self.q.shape[0], self.latent.shape[0], self.prefix
        kv_b = self.kv_b or Weight(f"{prefix}kv_b.weight", (rank, heads * (self.nope + self.v_width)))
        k_b = self.k_b or Weight(f"{prefix}k_b.weight", (self.nope, rank, heads))
        v_b = self.v_b or Weight(f"{prefix}v_b.weight", (rank, self.v_width, heads))
        return kv_b, k_b, v_b


@dataclass(frozen=True)
class SelectKeys(Op):
    """The positions of the top_k keys that a token's queries should see (DeepSeek-V3.2, arXiv:2512.02556, section 2.1).

    Appends k to the cache of `layer`; with `every`, that of the last token of each run of so many, and positions are those of
    runs. The score of a key is the sum over heads of factor * max(0, q . k).

    q (heads, width), k (width,), both rotated; factors (heads,), or None: ones -> (top_k,): positions in any order, as float32;
    where there are at most top_k keys, so that all are seen, -1 comes first

    open_run  -> (top_k + 1,): last comes the number of the run that is not complete, whose tokens are seen besides (Qwen 4 Exp)
    """

    q: Value
    k: Value
    factors: Value | None
    layer: int
    top_k: int
    every: int = 1
    open_run: bool = False


@dataclass(frozen=True)
class SelectBlocks(Op):
    """The blocks of `block` keys that a token's queries should see (MiniMax Sparse Attention).

    Appends k to the cache of `layer`. A block counts by the largest q . k of its keys up to the token itself; the token's own
    block and the `local` - 1 before it come first.

    q (heads, width), k (width,), both rotated -> (heads, top_k): numbers of blocks in any order, as float32; of fewer blocks
    than top_k, which are all seen, -1 comes first. Head h selects for the h-th run of the attention's heads.
    """

    q: Value
    k: Value
    layer: int
    block: int
    top_k: int
    local: int


@dataclass(frozen=True)
class ShortConvolution(Op):
    """A causal convolution over the tokens of a sequence, each channel by itself: x (channels,) -> (channels,).

    Its last inputs are the state of this name of `layer`.

    weight      (kernel, channels): a channel's last number multiplies the token itself, the one before it the token before
    activation  of the result: 'silu' or 'none'
    dilation    tokens from one that counts to the one before it that does
    """

    x: Value
    weight: Weight
    layer: int
    bias: Weight | None = None
    activation: str = "silu"
    state: str = "convolution"
    dilation: int = 1


@dataclass(frozen=True)
class GatedDeltaRule(Op):
    """The gated delta rule (Gated Delta Networks, arXiv:2412.06464, section 3.1).

    q, k (key heads, k_width); v (value heads, v_width); alpha, beta (value heads,) -> (value heads, v_width)

    Each value head has a matrix S (k_width, v_width), the state 'delta' of `layer`. For every token, with q and k divided by
    sqrt(sum(x^2) + epsilon):

        S = exp(decay * softplus(alpha + alpha_bias)) S
        S = S + sigmoid(beta) k (v - k S)
        out = q S / sqrt(k_width)

    alpha may be (value heads, k_width): then each row of S has a decay of its own (Kimi Delta Attention, arXiv:2510.26692).

    decay        (value heads,) or (1, value heads)
    alpha_bias   of alpha's size
    lower_bound  not 0: of the decay's logarithm, which is lower_bound * sigmoid(|decay| (alpha + alpha_bias)) then
    tiled              value head h has the queries and keys of head h modulo the number of key heads; else of head
                       h // (value heads / key heads)
    """

    q: Value
    k: Value
    v: Value
    alpha: Value
    beta: Value
    decay: Weight
    alpha_bias: Weight
    layer: int
    tiled: bool = False
    epsilon: float = 1e-6
    lower_bound: float = 0.0


@dataclass(frozen=True)
class SelectiveScan(Op):
    """A state space model whose factors depend on the input: Mamba-2 (arXiv:2405.21060, section 6), Mamba (arXiv:2312.00752).

    x (heads, width); dt (heads,) or, with one head, (1, width); b, c (groups, size) -> (heads, width)

    Each head has a matrix S (size, width), the state 'scan' of `layer`, and b and c of group h // (heads / groups). For every
    token, with the step d = softplus(dt + dt_bias):

        S = exp(d * decay) S + b (d * x)
        out = c S + skip * x

    decay  negative: (1, heads), one number for each head's S; with one head (size, width): one for each element (Mamba)
    skip   (1, heads), or (width,)
    """

    x: Value
    dt: Value
    b: Value
    c: Value
    decay: Weight
    skip: Weight
    layer: int
    dt_bias: Weight | None = None


@dataclass(frozen=True)
class Activation(Op):
    """function(x), element by element: 'silu', 'gelu' (its tanh form, arXiv:1606.08415), 'gelu_erf' (the same without the
    approximation), 'squared_relu' (arXiv:2109.08668)."""

    x: Value
    function: str


@dataclass(frozen=True)
class GatedActivation(Op):
    """function(gate) * up: 'silu', 'gelu', 'gelu_erf', 'sigmoid', 'identity', 'clamped_silu', 'clamped_swish'.

    limit          with 'silu': 0: none; else gate is limited to at most `limit`, up to +-limit (DeepSeek-V4)
    clamped_silu   silu(gate) limited to at most `limit`, up to +-limit (Step-3.5)
    clamped_swish  gate limited to at most `limit`, up to +-limit: gate * sigmoid(1.702 gate) * (up + 1) (gpt-oss)
    """

    gate: Value
    up: Value
    function: str = "silu"
    limit: float = 0.0


@dataclass(frozen=True)
class GateHeads(Op):
    """x (heads, width), each head times the sigmoid of its gate (heads,) (Step-3.5)."""

    x: Value
    gate: Value


@dataclass(frozen=True)
class Add(Op):
    """a + scale * b, of one shape."""

    a: Value
    b: Value
    scale: float = 1.0


@dataclass(frozen=True)
class Scale(Op):
    """x * factor."""

    x: Value
    factor: float


@dataclass(frozen=True)
class ScaleByPosition(Op):
    """x times the factor of each token's position."""

    x: Value
    temperature: Temperature


@dataclass(frozen=True)
class SoftCap(Op):
    """cap * tanh(x / cap)."""

    x: Value
    cap: float


# Ops of which a token's result depends on this token's inputs alone: neither on other tokens nor on its position.
BY_TOKEN: frozenset[type[Op]] = frozenset(
    (
        Concat, Linear, GroupedLinear, Split, Reshape, Norm, Activation, GatedActivation, GateHeads, Add, Scale, SoftCap, Xielu,
        Clamp, SoftplusGate, Multiply, GaussianTopK, Route, ScaleByRouting, ExpertLinear, CombineExperts, IdentityExperts,
        SigmoidGate,
    )
)  # fmt: skip
