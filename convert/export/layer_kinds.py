"""Lists with a word for each layer (layer_types, mlp_layer_types ...), from the tensors that a GGUF's layers have and from its
patterns of windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .facts import Facts

_PERIODS = range(2, 9)
_RECURRENT = ("ssm_", "shortconv.")


def _layer_types(facts: Facts) -> list[Any]:
    """Candidates for layer_types: recurrent layers and others; layers with and without a window; by compression."""
    n = facts.n_layers
    ratios = facts.key("attention.compress_ratios")
    if facts.architecture == "deepseek4" and isinstance(ratios, list):
        high = max(ratios, default=0)
        kinds = {0: "sliding_attention", high: "heavily_compressed_attention"}
        sparse = [facts.has(i, "indexer.") for i in range(n)]
        return [
            [
                "compressed_sparse_attention" if sparse[i] else kinds.get(r, "heavily_compressed_attention")
                for i, r in enumerate(ratios[:n])
            ]
        ]
    if facts.architecture == "kimi-k3":
        return []  # linear_attn_config says it
    if facts.architecture == "minimax-m3":
        return [["minimax_m3_sparse" if facts.has(i, "indexer.") else "full_attention" for i in range(n)]]
    recurrent = [facts.has(i, *_RECURRENT) for i in range(n)]
    if any(recurrent):
        pairs = (("linear_attention", "full_attention"), ("mamba", "attention"), ("conv", "full_attention"))
        if facts.has(recurrent.index(True), "shortconv."):
            pairs = (pairs[2],)
        return [[kinds[0] if each else kinds[1] for each in recurrent] for kinds in pairs]
    if facts.architecture in ("granite", "granitemoe"):
        return [None, ["attention"] * n]
    pattern = facts.key("attention.sliding_window_pattern")
    if isinstance(pattern, list):
        return [_windows(pattern[:n])]
    if not facts.key("attention.sliding_window"):
        return [None, _windows([False] * n)]
    periods = [_windows([(i + 1) % p != 0 for i in range(n)]) for p in _PERIODS]
    return [None, _windows([True] * n), *periods]


def _windows(pattern: list[bool]) -> list[str]:
    return ["sliding_attention" if local else "full_attention" for local in pattern]


def _feed_forward(facts: Facts) -> list[Any]:
    """Candidates for mlp_layer_types."""
    n = facts.n_layers
    if facts.architecture == "deepseek4":
        return [["hash_moe" if facts.has(i, "ffn_gate_tid2eid") else "moe" for i in range(n)]]
    sparse = [facts.has(i, "ffn_gate_inp.", "ffn_up_exps", "ffn_gate_up_exps") for i in range(n)]
    return [["sparse" if each else "dense" for each in sparse]] if any(sparse) else []


def _numbers(name: str, *, having: bool = True, first: int = 0) -> Callable[[Facts], list[Any]]:
    """The layers that have, or have not, such a tensor; first: number of the first one."""
    return lambda facts: [[i + first for i in range(facts.n_layers) if facts.has(i, name) == having]]


def _metadata(key: str) -> Callable[[Facts], list[Any]]:
    """A list of the metadata as it is, else an empty one."""
    return lambda facts: [facts.key(key) or []]


def _blocks(facts: Facts) -> list[Any]:
    """Candidates for layers_block_type, of layers with one block each."""
    kinds = (
        ("mamba", ("ssm_",)),
        ("attention", ("attn_q.",)),
        ("moe", ("ffn_gate_inp.", "ffn_up_exps")),
        ("mlp", ("ffn_up.",)),
    )
    found = [next((kind for kind, names in kinds if facts.has(i, *names)), "mlp") for i in range(facts.n_layers)]
    if facts.architecture == "jamba":
        return []
    return [found]


def _dense_only(facts: Facts) -> list[Any]:
    """Candidates for mlp_only_layers: those without experts, where any have them."""
    sparse = [facts.has(i, "ffn_gate_inp.") for i in range(facts.n_layers)]
    return [[i for i, each in enumerate(sparse) if not each]] if any(sparse) and not all(sparse) else []


def _draft_windows(facts: Facts) -> list[Any]:
    """Candidates for mtp_layer_types, of the draft layers."""
    pattern = facts.key("attention.sliding_window_pattern")
    if not isinstance(pattern, list) or len(pattern) <= facts.n_layers:
        return []
    return [_windows(pattern[facts.n_layers :])]


def _draft_feed_forward(facts: Facts) -> list[Any]:
    """Candidates for mtp_mlp_layer_types."""
    drafts = range(facts.n_layers, facts.n_layers + facts.n_draft)
    return [["sparse" if facts.has(i, "ffn_gate_inp.") else "dense" for i in drafts]] if facts.n_draft else []


def _indexers(facts: Facts) -> list[Any]:
    """Candidates for indexer_types."""
    kinds = ["full" if facts.has(i, "indexer.") else "shared" for i in range(facts.n_layers)]
    return [kinds] if "full" in kinds else []


def _first(names: tuple[str, ...]) -> Callable[[Facts], list[Any]]:
    """The first layer that has one of these tensors."""
    return lambda facts: next(([i] for i in range(facts.n_layers) if facts.has(i, *names)), [])


def _attention_period(facts: Facts) -> list[Any]:
    layers = [i for i in range(facts.n_layers) if facts.has(i, "attn_q.")]
    return [layers[1] - layers[0]] if len(layers) > 1 else [facts.n_layers] if layers else []


def _expert_period(facts: Facts) -> list[Any]:
    layers = [i for i in range(facts.n_layers) if facts.has(i, "ffn_gate_inp.")]
    return [layers[1] - layers[0]] if len(layers) > 1 else [facts.n_layers] if layers else []


LAYER_KINDS: dict[str, Callable[[Facts], list[Any]]] = {
    "layer_types": _layer_types,
    "mlp_layer_types": _feed_forward,
    "layers_block_type": _blocks,
    "mlp_only_layers": _dense_only,
    "indexer_types": _indexers,
    "mtp_layer_types": _draft_windows,
    "mtp_mlp_layer_types": _draft_feed_forward,
    "attn_layer_offset": _first(("attn_q.",)),
    "expert_layer_offset": _first(("ffn_gate_inp.",)),
    "attn_layer_period": _attention_period,
    "expert_layer_period": _expert_period,
    "ple_layer_ids": _numbers("ple_", first=1),
    "full_attn_layers": _numbers("attn_kv_a_mqa.", first=1),
    "kda_layers": _numbers("attn_kv_a_mqa.", having=False, first=1),
    "dsa_layers": _numbers("attn_indexer_k."),
    "block_post_layernorm_idx": _numbers("block_post_norm."),
    "swa_layers": _metadata("swa_layers"),
    "sliding_window_list": _metadata("sliding_window_list"),
}
