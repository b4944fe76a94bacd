"""A layer's feed-forward block as its tensors say: dense, or experts with a router, beside a shared expert or not."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ....formats import FormatError, PlanError
from ...hparams import HParams
from .feedforward import Activation, FusedFeedForward, GatedFeedForward, PlainFeedForward, gelu_times, silu_times
from .moe import SIGMOID, SOFTMAX, GatedShare, MixtureOfExperts, Router
from .weights import WeightStore

FeedForward = Callable[[np.ndarray], np.ndarray]


def feed_forward(
    store: WeightStore, hparams: HParams, layer: int, activation: Activation = silu_times, ungated: Activation = gelu_times
) -> FeedForward:
    """Experts where the layer has a router (ffn_gate_inp), a gated block where it has a gate (ffn_gate, or in ffn_up).

    ungated: the activation of a block without a gate. Raises FormatError for missing keys and tensors of a wrong shape.
    """
    prefix, n_embd = f"blk.{layer}.", hparams.int("embedding_length")
    if f"{prefix}ffn_gate_inp.weight" not in store:
        n_ff = hparams.size("feed_forward_length")
        if f"{prefix}ffn_gate.weight" in store or f"{prefix}ffn_up.weight" not in store:
            return GatedFeedForward.load(store, prefix, "", n_embd, n_ff, activation=activation)
        if store.tensor(f"{prefix}ffn_up.weight").shape[-1] == 2 * n_ff:
            return FusedFeedForward(store, prefix, n_embd, n_ff, activation)
        return PlainFeedForward(store, prefix, n_embd, n_ff, ungated)
    n_expert = hparams.int("expert_count")
    n_ff = hparams.int("expert_feed_forward_length", hparams.int("feed_forward_length", 0))
    experts = GatedFeedForward.load(store, prefix, "_exps", n_embd, n_ff, n_expert, activation=activation)
    return MixtureOfExperts(_router(store, hparams, prefix), experts, _shared(store, prefix, n_embd, activation))


def _router(store: WeightStore, hparams: HParams, prefix: str) -> Router:
    n_expert, gating = hparams.size("expert_count"), hparams.int("expert_gating_func", 0) or SOFTMAX
    if gating not in (SOFTMAX, SIGMOID):
        raise PlanError(f"{hparams.path}: expert gating function {gating} is not supported (1 softmax, 2 sigmoid)")

    groups, groups_used = (hparams.size(f"expert_group_{key}", 0, 0, n_expert) or 1 for key in ("count", "used_count"))
    used = hparams.size("expert_used_count", maximum=n_expert)
    groups_used = 1 if groups == 1 else groups_used  # whatever it says
    if n_expert % groups or groups_used > groups or used > n_expert // groups * groups_used:
        raise FormatError(
            f"{hparams.path}: {used} experts cannot be chosen from {groups_used} of {groups} equal groups of {n_expert} experts"
        )

    def vector(*names: str) -> np.ndarray | None:
        """The first of these that there is."""
        return next((store.vector(prefix + name, n_expert) for name in names if prefix + name in store), None)

    return Router(
        store.linear(f"{prefix}ffn_gate_inp.weight", hparams.int("embedding_length"), n_expert),
        used=used,
        gating=gating,
        # The first files left the suffix away.
        bias=vector("exp_probs_b.bias", "exp_probs_b"),
        groups=groups,
        groups_used=groups_used,
        normalise=hparams.flag("expert_weights_norm"),
        scale=hparams.float("expert_weights_scale", 0.0) or 1.0,
        offset=vector("ffn_gate_inp.bias"),
    )


def _shared(store: WeightStore, prefix: str, n_embd: int, activation: Activation) -> FeedForward | None:
    """The expert that every token goes to, if there is one; of the width that its tensors have."""
    if f"{prefix}ffn_up_shexp.weight" not in store:
        return None
    n_ff = store.tensor(f"{prefix}ffn_up_shexp.weight").shape[1]
    shared = GatedFeedForward.load(store, prefix, "_shexp", n_embd, n_ff, activation=activation)
    gate = f"{prefix}ffn_gate_inp_shexp.weight"
    return GatedShare(store.vector(gate, n_embd), shared) if gate in store else shared
