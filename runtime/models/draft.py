"""Draft layers (multi-token prediction, DeepSeek-V3, arXiv:2412.19437, section 2.2): a graph of its own for each of them.

    x = eh_proj @ [enorm(embedding of the next token), hnorm(hidden state)]
    hidden = shared_head_norm(layer(x)),  logits = shared_head_head @ hidden

The hidden state is the model's, or that of the draft layer before: behind the last norm, or the residual stream before it, by
architecture. An own embedding and output are used where the file has them, else the model's.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph import Graph, GraphBuilder, Value
from ..hparams import HParams


def draft_input(graph: GraphBuilder, layer: int, n_embd: int, epsilon: float, scale: float = 1.0) -> Value:
    """The input of a draft layer, from the tensors blk.N.nextn.{eh_proj,enorm,hnorm,embed_tokens}; scale: of embeddings."""
    prefix = f"blk.{layer}.nextn."
    table = f"{prefix}embed_tokens"
    e = graph.embedding(table if f"{table}.weight" in graph else "token_embd", n_embd, scale)
    e, h = graph.norm(e, f"{prefix}enorm", epsilon), graph.norm(graph.hidden_input(n_embd), f"{prefix}hnorm", epsilon)
    return graph.linear(graph.concat(e, h), f"{prefix}eh_proj", n_embd)


def finish_draft(
    graph: GraphBuilder,
    hparams: HParams,
    layer: int,
    x: Value,
    epsilon: float,
    *,
    scale: float = 1.0,
    softcap: float = 0.0,
    unnormed: bool = False,
    chained: bool = True,
) -> Graph:
    """The graph of a draft layer, whose residual stream ends in x.

    scale, softcap: of the model's logits; unnormed: its hidden state for the next is x; chained: as `Graph.is_chained`."""
    graph.end_layer(x)
    names = (f"blk.{layer}.nextn.shared_head_norm", f"blk.{layer}.layer_output_norm", "output_norm")  # the second: Ling 2
    name = next(name for name in names if f"{name}.weight" in graph or name == names[-1])

    def norm(x: Value) -> Value:
        return graph.norm(x, name, epsilon)

    made = graph.finish(
        hparams.architecture,
        x if unnormed else norm(x),
        hparams.size("context_length"),
        scale=scale,
        softcap=softcap,
        output=f"blk.{layer}.nextn.shared_head_head",
        head_norm=norm if unnormed else None,
    )
    return replace(made, is_chained=chained)
