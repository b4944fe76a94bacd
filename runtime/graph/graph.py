"""A graph; its builder, with which the files in runtime/models write a model down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from math import prod

import numpy as np

from ...data_classes import dataclass
from ...formats import FormatError, TensorSource
from ...formats.source import LORA_A, LORA_B
from . import activation_ops, ops
from .ops import Op
from .values import CacheSpec, RotaryEmbedding, RoutingValue, StateSpec, Temperature, Value, Weight


@dataclass(frozen=True)
class Graph:
    """A model.

    ops         from token ids to `hidden`, in an order in which they can be run
    hidden      the last norm's output, or its input where draft layers read that: the head then begins with the norm
    head        from `hidden` to `logits`; a model that predicts no tokens (an encoder) has none, nor `logits` and `output`
    layers      the residual stream after each layer
    cache       what each layer keeps, per token or per sequence
    n_ctx_train the context length that the model was trained for
    n_layers    the length of `layers`, also where a part of a graph has none of them
    is_chained  of a draft layer: whether it reads the output of the draft layer before it; else the model's, as the first does
    """

    architecture: str
    ops: tuple[Op, ...]
    head: tuple[Op, ...]
    hidden: Value
    logits: Value | None
    layers: tuple[Value, ...]
    cache: tuple[CacheSpec | StateSpec, ...]
    embedding: Weight
    output: Weight | None
    n_ctx_train: int
    is_chained: bool = True
    n_layers: int = 0

    @property
    def n_embd(self) -> int:
        return self.hidden.shape[0]

    @property
    def n_vocab(self) -> int:
        return self.embedding.shape[1] if self.logits is None else self.logits.shape[0]

    @cached_property
    def is_causal(self) -> bool:
        """Whether no token depends on later ones."""
        return all(op.causal for op in self.ops if isinstance(op, ops.Attention))

    @cached_property
    def n_positions(self) -> int | None:
        """How many tokens a sequence may have at most: as many as positions have embeddings. None: any number."""
        tables = (op.table for op in self.ops if isinstance(op, ops.Embedding) and op.by == "position")
        return min((table.shape[1] for table in tables), default=None)


class GraphBuilder:
    """Makes ops one after the other and checks that shapes fit; each method returns the new value.

    Weights are named without suffix: `linear(x, "blk.0.attn_q", 512)` uses blk.0.attn_q.weight, and blk.0.attn_q.bias where the
    model has one. Raises FormatError for a tensor that is missing or has another shape.
    """

    def __init__(self, source: TensorSource):
        self.source = source
        self.ops: list[Op] = []
        self.layers: list[Value] = []
        self.cache: list[CacheSpec | StateSpec] = []
        self._values = 0

    # --- tensors ------------------------------------------------------------------------------------------------------

    def __contains__(self, name: str) -> bool:
        """Whether the model has a tensor of this full name."""
        return name in self.source.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        """A tensor's shape in ne order. Raises FormatError if it is missing."""
        tensor = self.source.tensors.get(name)
        if tensor is None:
            raise FormatError(f"{self.source.path}: tensor {name} is missing")
        return tensor.shape

    def weight(self, name: str, *shapes: tuple[int, ...]) -> Weight:
        """A tensor that has one of these shapes (any, if none is given)."""
        shape = self.shape(name)
        if shapes and shape not in shapes:
            expected = " or ".join(map(str, dict.fromkeys(shapes)))
            raise FormatError(f"{self.source.path}: tensor {name} has shape {shape}, expected is {expected}")
        return Weight(name, shape)

    def optional(self, name: str, *shapes: tuple[int, ...]) -> Weight | None:
        """As `weight`; None where the model has no such tensor."""
        return self.weight(name, *shapes) if name in self else None

    def vector(self, name: str, size: int) -> np.ndarray:
        """The numbers of a tensor that decides what the graph is: float32 [size]."""
        self.weight(name, (size,))
        return self.source.tensors[name].read(0, 1)[0]

    def _fit(self, fits: bool, what: str) -> None:
        if not fits:
            raise FormatError(f"{self.source.path}: shapes do not fit together in {what}")

    # --- ops ----------------------------------------------------------------------------------------------------------

    def value(self, *shape: int) -> Value:
        self._values += 1
        return Value(self._values - 1, shape)

    def append(self, op: Op) -> Value:
        """Adds an op that was made by hand."""
        self.ops.append(op)
        return op.out

    def embedding(self, name: str, n_embd: int, scale: float = 1.0, *, by: str = "token", separator: int = -1) -> Value:
        shape = self.shape(f"{name}.weight")
        rows = shape[1] if len(shape) > 1 else 1
        table = self.weight(f"{name}.weight", (n_embd, rows), *[(n_embd,)] * (rows == 1))
        return self.append(ops.Embedding(self.value(n_embd), Weight(table.name, (n_embd, rows)), scale, by, separator))

    def hidden_input(self, n_embd: int) -> Value:
        return self.append(ops.HiddenInput(self.value(n_embd)))

    def concat(self, a: Value, b: Value) -> Value:
        self._fit(len(a.shape) == len(b.shape) == 1, f"rows of {a.shape} and {b.shape} one behind the other")
        return self.append(ops.Concat(self.value(a.shape[0] + b.shape[0]), a, b))

    def linear(self, x: Value, name: str, rows: int) -> Value:
        columns = prod(x.shape)
        weight = self.weight(f"{name}.weight", (columns, rows))
        out = self.append(ops.Linear(self.value(rows), x, weight, self.optional(f"{name}.bias", (rows,))))
        if weight.name + LORA_A not in self:
            return out
        inner = self._adapter_factor(weight, LORA_A)
        low = self.append(ops.Linear(self.value(inner.shape[1]), x, inner))
        return self.add(out, self.append(ops.Linear(self.value(rows), low, self._adapter_factor(weight, LORA_B))))

    def _adapter_factor(self, weight: Weight, part: str) -> Weight:
        """One factor of the change that an adapter (see `runtime.adapters`) makes of a weight."""
        name = weight.name + part
        columns, rows = self.shape(name)[:2]
        fits = weight.shape[0] == columns if part == LORA_A else weight.shape[1] == rows
        self._fit(fits, f"{name} {self.shape(name)} of {weight.shape}")
        return self.weight(name, (columns, rows, *weight.shape[2:]))

    def split(self, x: Value, *sizes: int) -> tuple[Value, ...]:
        self._fit(sum(sizes) == x.shape[-1], f"a split of {x.shape} into {sizes}")
        parts = tuple(self.value(*x.shape[:-1], size) for size in sizes)
        self.append(ops.Split(parts[0], x, sizes, parts[1:]))
        return parts

    def reshape(self, x: Value, *shape: int) -> Value:
        self._fit(prod(shape) == prod(x.shape), f"a reshape of {x.shape} to {shape}")
        return self.append(ops.Reshape(self.value(*shape), x))

    def norm(self, x: Value, name: str, epsilon: float, *, kind: str = "rms") -> Value:
        """The weight's shape says what it goes over: the last axis (perhaps with weights per head), or all heads together.

        The weight may also be named NAME, without suffix (Falcon-H1's ffn_norm)."""
        width, size = x.shape[-1], prod(x.shape)
        full_name = name if name in self else f"{name}.weight"
        weight = self.weight(full_name, (width,), (size,), x.shape[::-1])
        over = "all" if weight.shape == (size,) and size != width else "last"
        bias = self.optional(f"{name}.bias", weight.shape) if kind == "layer" else None
        return self.append(ops.Norm(self.value(*x.shape), x, weight, epsilon, bias, kind, over))

    def plain_norm(self, x: Value, epsilon: float, kind: str = "rms") -> Value:
        """The norm of each row of the last axis, without weights."""
        return self.append(ops.Norm(self.value(*x.shape), x, None, epsilon, kind=kind))

    def rope(self, x: Value, rope: RotaryEmbedding, start: int = 0) -> Value:
        self._fit(start + rope.dims <= x.shape[-1], f"a rotation of {start}...{start + rope.dims} of {x.shape}")
        return self.append(ops.Rope(self.value(*x.shape), x, rope, start))

    def attention(self, q: Value, k: Value | None, v: Value | None, layer: int, scale: float, **options) -> Value:
        """options: window, softcap, sinks, chunked, selection, block, alibi, causal of `ops.Attention`."""
        if k is None or v is None:
            kept = {spec.name: spec for spec in self.cache if spec.layer == layer and isinstance(spec, CacheSpec)}
            fits = {"k", "v"} <= kept.keys() and q.shape[1] == kept["k"].width and q.shape[0] % kept["k"].heads == 0
            self._fit(fits, f"attention of queries {q.shape} over what layer {layer} keeps")
            return self.append(ops.Attention(self.value(q.shape[0], kept["v"].width), q, None, None, layer, scale, **options))
        fits = q.shape[1] == k.shape[1] and k.shape[0] == v.shape[0] and q.shape[0] % k.shape[0] == 0
        self._fit(fits, f"attention of queries {q.shape} over keys {k.shape} and values {v.shape}")
        self.cache += [CacheSpec(layer, "k", *k.shape), CacheSpec(layer, "v", *v.shape)]
        return self.append(ops.Attention(self.value(q.shape[0], v.shape[1]), q, k, v, layer, scale, **options))

    def latent_attention(
        self,
        q: Value,
        latent: Value,
        k_pe: Value,
        layer: int,
        scale: float,
        v_width: int,
        prefix: str,
        selection: Value | None = None,
    ) -> Value:
        """prefix: of the tensors kv_b, k_b and v_b, of which kv_b has to be there, or the other two."""
        (heads, width), (rank,), (rope,) = q.shape, latent.shape, k_pe.shape
        nope = width - rope
        self._fit(nope > 0, f"latent attention of queries {q.shape} and rotated keys {k_pe.shape}")
        kv_b = self.optional(f"{prefix}kv_b.weight", (rank, heads * (nope + v_width)))
        k_b = self.optional(f"{prefix}k_b.weight", (nope, rank * heads), (nope, rank, heads))
        v_b = self.optional(f"{prefix}v_b.weight", (rank, heads * v_width), (rank, v_width, heads))
        if kv_b is None and (k_b is None or v_b is None):
            raise FormatError(f"{self.source.path}: {prefix}kv_b.weight is missing, and so is {prefix}k_b or {prefix}v_b")
        self.cache.append(CacheSpec(layer, "latent", 1, rank + rope))
        out = self.value(heads, v_width)
        return self.append(ops.LatentAttention(out, q, latent, k_pe, layer, scale, v_width, prefix, kv_b, k_b, v_b, selection))

    def select_keys(self, q: Value, k: Value, factors: Value | None, layer: int, top_k: int, every=1, open_run=False) -> Value:
        self._fit(q.shape == (*(factors or q).shape[:1], *k.shape), f"an indexer of queries {q.shape}, key {k.shape}")
        self.cache.append(CacheSpec(layer, "index_k", 1, k.shape[0], every))
        return self.append(ops.SelectKeys(self.value(top_k + open_run), q, k, factors, layer, top_k, every, open_run))

    def select_blocks(self, q: Value, k: Value, layer: int, *, block: int, top_k: int, local: int) -> Value:
        self._fit(q.shape[1:] == k.shape, f"an indexer of queries {q.shape}, key {k.shape}")
        self.cache.append(CacheSpec(layer, "index_k", 1, *k.shape))
        return self.append(ops.SelectBlocks(self.value(q.shape[0], top_k), q, k, layer, block, top_k, local))

    def short_convolution(self, x: Value, name: str, layer: int, activation="silu", state="convolution", dilation=1) -> Value:
        (channels,), kernel = x.shape, self.shape(f"{name}.weight")[0]
        weight = self.weight(f"{name}.weight", (kernel, channels), (kernel, 1, channels))
        bias = self.optional(f"{name}.bias", (channels,))
        self.cache.append(StateSpec(layer, state, ((kernel - 1) * dilation, channels)))
        return self.append(ops.ShortConvolution(self.value(channels), x, weight, layer, bias, activation, state, dilation))

    def gated_delta_rule(
        self, q: Value, k: Value, v: Value, alpha: Value, beta: Value, layer: int, prefix: str, **options
    ) -> Value:
        """prefix: of the tensors a and dt.bias; options: `tiled` and `lower_bound` of `ops.GatedDeltaRule`."""
        heads, rows = v.shape[0], k.shape[1]
        fits = q.shape == k.shape and alpha.shape in ((heads,), (heads, rows)) and beta.shape == (heads,)
        fits = fits and heads % k.shape[0] == 0
        self._fit(fits, f"the delta rule of queries {q.shape}, keys {k.shape}, values {v.shape} and factors {alpha.shape}")
        decay, bias = self.weight(f"{prefix}a", (heads,), (1, heads)), self.weight(f"{prefix}dt.bias", (prod(alpha.shape),))
        self.cache.append(StateSpec(layer, "delta", (heads, rows, v.shape[1])))
        out = self.value(*v.shape)
        return self.append(ops.GatedDeltaRule(out, q, k, v, alpha, beta, decay, bias, layer, **options))

    def selective_scan(self, x: Value, dt: Value, b: Value, c: Value, layer: int, prefix: str) -> Value:
        """prefix: of the tensors a, d and, for one step per head, dt.bias."""
        (heads, width), (groups, size) = x.shape, b.shape
        per_head = dt.shape == (heads,)
        fits = b.shape == c.shape and heads % groups == 0 and (per_head or (heads == 1 and dt.shape == x.shape))
        self._fit(fits, f"a scan of {x.shape} with steps {dt.shape} and factors {b.shape} and {c.shape}")
        decay = self.weight(f"{prefix}a", (1, heads) if per_head else (size, width))
        skip = self.weight(f"{prefix}d", (1, heads) if per_head else (width,))
        bias = self.weight(f"{prefix}dt.bias", (heads,)) if per_head else None
        self.cache.append(StateSpec(layer, "scan", (heads, size, width)))
        return self.append(ops.SelectiveScan(self.value(heads, width), x, dt, b, c, decay, skip, layer, bias))

    def activation(self, x: Value, function: str) -> Value:
        return self.append(ops.Activation(self.value(*x.shape), x, function))

    def xielu(self, x: Value, alpha_p: float, alpha_n: float, beta: float, epsilon: float) -> Value:
        return self.append(activation_ops.Xielu(self.value(*x.shape), x, alpha_p, alpha_n, beta, epsilon))

    def clamp(self, x: Value, limit: float) -> Value:
        return self.append(activation_ops.Clamp(self.value(*x.shape), x, limit)) if limit else x

    def softplus_gate(self, gate: Value, x: Value) -> Value:
        self._fit(gate.shape[0] in (x.shape[0], prod(x.shape)), f"a gate of {gate.shape} for {x.shape}")
        return self.append(activation_ops.SoftplusGate(self.value(*x.shape), gate, x))

    def gated(self, gate: Value, up: Value, function: str, limit: float = 0.0) -> Value:
        self._fit(gate.shape == up.shape, f"a product of {gate.shape} and {up.shape}")
        return self.append(ops.GatedActivation(self.value(*gate.shape), gate, up, function, limit))

    def route(self, logits: Value, used: int, **options) -> RoutingValue:
        """options: those of `ops.Route`."""
        self._values += 1
        out = RoutingValue(self._values - 1, (used,))
        self.ops.append(ops.Route(out, logits, used, **options))
        return out

    def expert_linear(self, x: Value, routing: RoutingValue, name: str, rows: int, experts: int) -> Value:
        weight = self.weight(f"{name}.weight", (x.shape[-1], rows, experts))
        bias = self.optional(f"{name}.bias", (rows, experts))
        out = self.append(ops.ExpertLinear(self.value(*routing.shape, rows), x, routing, weight, bias))
        if weight.name + LORA_A not in self:
            return out
        inner, outer = (self._adapter_factor(weight, part) for part in (LORA_A, LORA_B))
        low = self.append(ops.ExpertLinear(self.value(*routing.shape, inner.shape[1]), x, routing, inner))
        return self.add(out, self.append(ops.ExpertLinear(self.value(*routing.shape, rows), low, routing, outer)))

    def scale_by_routing(self, x: Value, routing: RoutingValue) -> Value:
        return self.append(ops.ScaleByRouting(self.value(*routing.shape, *x.shape), x, routing))

    def combine(self, x: Value, routing: RoutingValue, weighted: bool = True) -> Value:
        return self.append(ops.CombineExperts(self.value(*x.shape[1:]), x, routing, weighted))

    def identity_experts(self, x: Value, routing: RoutingValue) -> Value:
        return self.append(ops.IdentityExperts(self.value(*x.shape), x, routing))

    def sigmoid_gate(self, x: Value, y: Value, name: str) -> Value:
        return self.append(ops.SigmoidGate(self.value(*y.shape), x, y, self.weight(f"{name}.weight", x.shape)))

    def gate_heads(self, x: Value, gate: Value) -> Value:
        self._fit(gate.shape == x.shape[:1], f"a gate {gate.shape} of heads {x.shape}")
        return self.append(ops.GateHeads(self.value(*x.shape), x, gate))

    def add(self, a: Value, b: Value, scale: float = 1.0) -> Value:
        self._fit(a.shape == b.shape, f"a sum of {a.shape} and {b.shape}")
        return self.append(ops.Add(self.value(*a.shape), a, b, scale))

    def scale(self, x: Value, factor: float) -> Value:
        return x if factor == 1 else self.append(ops.Scale(self.value(*x.shape), x, factor))

    def scale_by_position(self, x: Value, temperature: Temperature | None) -> Value:
        return x if temperature is None else self.append(ops.ScaleByPosition(self.value(*x.shape), x, temperature))

    def softcap(self, x: Value, cap: float) -> Value:
        return self.append(ops.SoftCap(self.value(*x.shape), x, cap)) if cap else x

    # --- the whole ----------------------------------------------------------------------------------------------------

    def end_layer(self, x: Value) -> None:
        """Says that x is the residual stream behind the next layer."""
        self.layers.append(x)

    def finish(
        self,
        architecture: str,
        hidden: Value,
        n_ctx_train: int,
        *,
        scale: float = 1.0,
        softcap: float = 0.0,
        output: str = "output",
        head_norm: Callable[[Value], Value] | None = None,
    ) -> Graph:
        """Adds the head: output.weight (or the embeddings, where the model has none), logits times scale, soft cap.

        output: the name of another matrix, used where the model has it; head_norm: adds the norm that the head begins with."""
        body, embedding = self._body()
        outputs = (output, "output", embedding.name.removesuffix(".weight"))
        name = next(name for name in outputs if f"{name}.weight" in self)
        normalised = hidden if head_norm is None else head_norm(hidden)
        logits = self.softcap(self.scale(self.linear(normalised, name, embedding.shape[1]), scale), softcap)
        head = self.ops
        matrix = next(op.weight for op in head if isinstance(op, ops.Linear))
        layers, cache = tuple(self.layers), tuple(self.cache)
        made = architecture, body, tuple(head), hidden, logits, layers, cache, embedding, matrix, n_ctx_train
        return Graph(*made, n_layers=len(layers))

    def finish_encoder(self, architecture: str, hidden: Value, n_ctx_train: int) -> Graph:
        """As `finish`, of a model without a head."""
        body, embedding = self._body()
        layers, cache = tuple(self.layers), tuple(self.cache)
        made = architecture, body, (), hidden, None, layers, cache, embedding, None, n_ctx_train
        return Graph(*made, n_layers=len(layers))

    def _body(self) -> tuple[tuple[Op, ...], Weight]:
        """The ops so far, and the table of the tokens' embeddings."""
        body, self.ops = tuple(self.ops), []
        return body, next(op.table for op in body if isinstance(op, ops.Embedding))


def users(ops_: Sequence[Op]) -> dict[int, list[Op]]:
    """Value index -> the ops that read it, in order."""
    out: dict[int, list[Op]] = {}
    for op in ops_:
        for value in op.inputs:
            out.setdefault(value.index, []).append(op)
    return out
