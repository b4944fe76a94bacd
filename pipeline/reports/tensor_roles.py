"""The role of a tensor by its name: reports add up sizes by role."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ...jobs.plan import Output

_ROLES = (
    ("routed experts", r"_exps\b"),
    ("shared experts", r"_shexp\b"),
    ("router", r"ffn_gate_inp|exp_probs_b"),
    ("norms", r"norm"),
    ("attention", r"\.(attn|ssm)_"),
    ("feed forward", r"\.ffn_"),
    ("embeddings", r"^(token_embd|per_layer_token_embd)"),
    ("output", r"^output"),
)


def role(name: str) -> str:
    """The first role whose pattern matches; 'other' if none does."""
    return next((label for label, pattern in _ROLES if re.search(pattern, name)), "other")


def sizes(outputs: Iterable[Output]) -> dict[str, dict[str, int]]:
    """role -> type name -> bytes, the largest role and type first."""
    by_role: dict[str, dict[str, int]] = {}
    for o in outputs:
        types = by_role.setdefault(role(o.name), {})
        types[o.type.name] = types.get(o.type.name, 0) + o.nbytes
    order = sorted(by_role, key=lambda r: -sum(by_role[r].values()))
    return {r: dict(sorted(by_role[r].items(), key=lambda item: -item[1])) for r in order}
